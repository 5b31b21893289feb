"""Times what a sync over peer memory costs the host: blocks by both ways, and what is around them.

    python -m pip install -q --no-deps --no-build-isolation -e .  # compiles csrc/
    python benchmarks/bench_copies.py OUT.json                    # with two GPUs over the link

The blocks are those of Qwen2.5-7B, TP2 -> TP1 (142) and TP4 -> TP1 (426, of one peer here). Bits
are compared before anything is timed. `host_us` is until the call returns, the device idle before
it, `device_ms` until it has copied: medians of --repeats. Ways:

* ctypes, compiled: as `ops.block_copies` queues them, with the three waits of a sync around them.
* one_by_one: a `copy_` of torch a block.
* graph, N branches: a CUDA graph of the copies in N chains side by side, replayed. One chain leaves
  the engines idle between copies over the link (docs/adr/0003); does one a copy engine do so too?
* pitched: gate and up of a layer as one copy of two rows, if the driver takes it: fewer blocks.
* layers: as many bytes in blocks of the same sizes, each kind of all layers as one copy of as many
  rows. It needs layers that are equally far apart at both ends, which an engine's are not by
  themselves: this says whether making them so would be worth it.

`around` has what else a sync asks of the host: comparing addresses, a wait, a launch of Triton by
its just-in-time compiler and by the compiled kernel, and a copy on another stream.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from case_record import commit
from hybridrl.kernels import rectangles
from hybridrl.kernels.copy_engine import BlockCopies, CompiledBlockCopies

from hybridrl import ops
from hybridrl.hybrid_engine.transports.transport import AddressWatch
from hybridrl.parallel.device_mapping import DeviceMapping

MODEL = Path(__file__).parent / "models" / "qwen2.5-7b.json"
BRANCHES = (1, 2, 3, 4, 8, 16)
Pair = tuple[torch.Tensor, torch.Tensor]


def main() -> None:
    """Measures both layouts and writes OUT.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    here = torch.device("cuda", 0)
    peer = torch.device("cuda", 1 if torch.cuda.device_count() > 1 else 0)
    report: dict[str, Any] = {
        "benchmark": "copies of blocks",
        "command": "python " + " ".join([Path(sys.argv[0]).name, *sys.argv[2:]]),
        "commit": commit(),
        "device": torch.cuda.get_device_name(here),
        "over_a_link": peer != here,
        "torch": torch.__version__,
        "is_compiled": ops.compiled_operations() is not None,
    }
    for tp in (2, 4):
        found = layout(tp, here, peer, arguments.repeats)
        found["layers"] = timed(layers_at_once(tp, here, peer), arguments.repeats)
        report[f"tp{tp}"] = found
    report["graph_after_remapping"] = remapped(here, peer)
    report["around"] = around(here, arguments.repeats)
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


def layout(tp: int, here: torch.device, peer: torch.device, repeats: int) -> dict[str, Any]:
    """Measures the blocks that one rank of TP `tp` -> TP1 gets from its peers."""
    pairs, rows = blocks(tp, here, peer)
    engines, current = torch.cuda.Stream(here), torch.cuda.current_stream(here)
    around_them = [(engines, current)], [(current, engines)]
    ways: dict[str, Callable[[], object]] = {}
    by_ctypes = BlockCopies(pairs)
    ways["ctypes"] = lambda: by_ctypes.run(engines, *around_them)
    compiled = ops.compiled_operations()
    if compiled is not None:
        native = CompiledBlockCopies(pairs, compiled.queue_blocks)
        ways["compiled"] = lambda: native.run(engines, *around_them)
    ways["one_by_one"] = lambda: one_by_one(pairs)
    one_by_one(pairs)
    torch.cuda.synchronize()
    for branches in BRANCHES:
        ways[f"graph, {branches} branches"] = graph_of(pairs, branches, here).replay
    pitched = Pitched(pairs, rows)
    ways["pitched"] = lambda: pitched.run(current)
    found: dict[str, Any] = {"blocks": len(pairs), "gb": sum(d.nbytes for _, d in pairs) / 1e9}
    found["pitched_calls"] = pitched.num_calls
    for name, run in ways.items():
        try:
            check(pairs, run)
        except RuntimeError as error:
            found[name] = {"error": str(error)}
            continue
        found[name] = timed(run, repeats)
    return found


def layers_at_once(tp: int, here: torch.device, peer: torch.device) -> Callable[[], object]:
    """Returns what queues a copy of all layers for each kind of block; its bits were compared."""
    config = json.loads(MODEL.read_text())
    hidden, inner, layers = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    part, wide = 2 * hidden * hidden // tp, 2 * hidden * inner // tp
    sizes = [part, part, wide, wide, wide] * (tp - 1)
    row = sum(sizes)
    embeddings = 2 * (2 * config["vocab_size"] * hidden // tp) * (tp - 1)
    source = torch.randint(0, 255, (layers * row + embeddings,), dtype=torch.uint8, device=peer)
    dest = torch.zeros(layers * row * 2 + embeddings, dtype=torch.uint8, device=here)
    call, default = ctypes.CDLL("libcudart.so.13").cudaMemcpy2DAsync, 4  # cudaMemcpyDefault
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    places = [
        (dest.data_ptr() + start, 2 * row, source.data_ptr() + start, row, size, layers)
        for start, size in zip(starts, sizes, strict=True)
    ]
    ends = dest.data_ptr() + layers * row * 2, source.data_ptr() + layers * row
    places.append((ends[0], embeddings, ends[1], embeddings, embeddings, 1))
    arguments = [[ctypes.c_size_t(field) for field in place] for place in places]
    handle = ctypes.c_void_p(torch.cuda.current_stream(here).cuda_stream)

    def run() -> None:
        for fields in arguments:
            code = call(*fields, default, handle)
            if code != 0:
                raise RuntimeError(f"cudaMemcpy2DAsync: CUDA error {code}")

    run()
    torch.cuda.synchronize()
    rows, wanted = dest[: layers * row * 2].view(layers, 2, row)[:, 0], source.to(here)
    is_equal = torch.equal(rows.flatten(), wanted[: layers * row])
    if not is_equal or not torch.equal(dest[layers * row * 2 :], wanted[layers * row :]):
        raise RuntimeError("a block has other bits than its source")
    run.memory = source, dest  # type: ignore[attr-defined]  # as long as it may run
    return run


def blocks(
    tp: int, here: torch.device, peer: torch.device
) -> tuple[list[Pair], list[tuple[int, int]]]:
    """Returns the blocks, sources in one piece of memory, and which two lie in one tensor."""
    config = json.loads(MODEL.read_text())
    hidden, inner, layers = (
        config[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")
    )
    part = hidden * hidden // tp
    wide = hidden * inner // tp
    sizes, dests, rows = [], [], []
    embeddings = config["vocab_size"] * hidden // tp
    parts = tp - 1
    for _ in range(2):  # embedding and head
        whole = torch.empty(embeddings * tp, dtype=torch.bfloat16, device=here)
        for number in range(parts):
            dests.append(whole[number * embeddings : (number + 1) * embeddings])
    for _ in range(layers):
        for size, copies in ((part, 1), (part, 1), (wide, 2), (wide, 1)):
            whole = torch.empty(copies * size * tp, dtype=torch.bfloat16, device=here)
            for number in range(parts):
                start = len(dests)
                for half in range(copies):
                    offset = half * size * tp + number * size
                    dests.append(whole[offset : offset + size])
                if copies == 2:
                    rows.append((start, start + 1))
    sizes = [dest.numel() for dest in dests]
    memory = torch.randint(-100, 100, (sum(sizes),), dtype=torch.int16, device=peer)
    sources = memory.view(torch.bfloat16).split(sizes)
    return list(zip(sources, dests, strict=True)), rows


def check(pairs: list[Pair], run: Callable[[], object]) -> None:
    """Raises RuntimeError unless the way brings every block's bits."""
    for _, dest in pairs:
        dest.zero_()
    torch.cuda.synchronize()
    run()
    torch.cuda.synchronize()
    for source, dest in pairs:
        if not torch.equal(source.view(torch.int16).to(dest.device), dest.view(torch.int16)):
            raise RuntimeError("a block has other bits than its source")


def one_by_one(pairs: list[Pair]) -> None:
    for source, dest in pairs:
        dest.copy_(source, non_blocking=True)


def graph_of(pairs: list[Pair], branches: int, device: torch.device) -> torch.cuda.CUDAGraph:
    """Returns a graph of the copies: in so many chains, every next copy in another one."""
    call, default = ctypes.CDLL("libcudart.so.13").cudaMemcpyAsync, 4  # cudaMemcpyDefault
    streams = [torch.cuda.Stream(device) for _ in range(branches)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        origin = torch.cuda.current_stream(device)
        for number, stream in enumerate(streams):
            stream.wait_stream(origin)
            handle = ctypes.c_void_p(stream.cuda_stream)
            for source, dest in pairs[number::branches]:
                fields = dest.data_ptr(), source.data_ptr(), dest.nbytes
                code = call(*map(ctypes.c_size_t, fields), default, handle)
                if code != 0:
                    raise RuntimeError(f"cudaMemcpyAsync: CUDA error {code}")
            origin.wait_stream(stream)
    return graph


def remapped(here: torch.device, peer: torch.device) -> bool:
    """Whether a graph still brings all bits once its destination has other physical memory, as
    engines' parameters get where phases free memory.
    """
    mapping, size = DeviceMapping(here), 64 << 20
    start = mapping.reserve(size)
    sources = torch.arange(size // 2, device=peer).to(torch.int16).view(torch.bfloat16)
    old: list[int] = []
    graph = None
    for _ in range(3):
        handle = mapping.create(size)  # before the old one goes, so it is other memory
        if old:
            mapping.wait()
            mapping.unmap(start, size)
            mapping.release(old.pop())
        mapping.map(start, size, handle)
        mapping.allow(start, size)
        old.append(handle)
        dest = mapping.tensor(start, size).view(torch.bfloat16)
        dest.zero_()
        pairs = list(zip(sources.split(1 << 20), dest.split(1 << 20), strict=True))
        graph = graph or graph_of(pairs, 4, here)
        graph.replay()
        torch.cuda.synchronize()
        if not torch.equal(sources.view(torch.int16).to(here), dest.view(torch.int16)):
            return False
    return True


class Pitched:
    """Two blocks of one tensor, as far apart in it as anywhere, in one two-dimensional copy."""

    def __init__(self, pairs: list[Pair], rows: list[tuple[int, int]]) -> None:
        self._call = ctypes.CDLL("libcudart.so.13").cudaMemcpy2DAsync
        second = {other for _, other in rows}
        heights = {one: pairs[other] for one, other in rows}
        self._arguments = []
        for index, (source, dest) in enumerate(pairs):
            if index in second:
                continue
            apart, height = (dest.nbytes, dest.nbytes), 1
            if index in heights:
                below, under = heights[index]
                height = 2
                apart = (
                    under.data_ptr() - dest.data_ptr(),
                    below.data_ptr() - source.data_ptr(),
                )
            fields = dest.data_ptr(), apart[0], source.data_ptr(), apart[1], dest.nbytes, height
            self._arguments.append([ctypes.c_size_t(field) for field in fields])

    @property
    def num_calls(self) -> int:
        return len(self._arguments)

    def run(self, stream: torch.cuda.Stream) -> None:
        handle, default = ctypes.c_void_p(stream.cuda_stream), 4  # cudaMemcpyDefault
        for arguments in self._arguments:
            code = self._call(*arguments, default, handle)
            if code != 0:
                raise RuntimeError(f"cudaMemcpy2DAsync: CUDA error {code}")


def timed(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Returns medians: of the host until the call returns, and until the device is done."""
    host, device = [], []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        returned = time.perf_counter()
        torch.cuda.synchronize()
        host.append(returned - began)
        device.append(time.perf_counter() - began)
    return {
        "host_us": round(1e6 * statistics.median(host[3:]), 1),
        "host_p90_us": round(1e6 * sorted(host[3:])[int(0.9 * repeats)], 1),
        "device_ms": round(1e3 * statistics.median(device[3:]), 3),
    }


def around(device: torch.device, repeats: int) -> dict[str, float]:
    """Returns the host's time of what a sync does beside blocks, microseconds."""
    tensors = {str(n): torch.nn.Parameter(torch.empty(8, device=device)) for n in range(198)}
    source, dest = (torch.zeros(512, 64, device=device) for _ in "sd")
    copies = rectangles.RectangleCopies([(source, dest)], device, programs=48)
    aside, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)

    places = AddressWatch(tensors)
    places.look_again()

    def launch_aside() -> None:
        with torch.cuda.stream(aside):
            copies.run()

    things: dict[str, Callable[[], object]] = {
        "addresses of 198 tensors": places.look_again,
        "wait of torch": lambda: aside.wait_stream(current),
        "Triton by its compiler": copies.run,
        "Triton on another stream": launch_aside,
    }
    compiled = ops.compiled_operations()
    if compiled is not None:
        empty = CompiledBlockCopies([], compiled.queue_blocks)
        things["wait, compiled"] = lambda: empty.run(aside, [(aside, current)])
    table, (_, _, unit) = copies._launches[0]
    kernel = rectangles._copy_rectangles[(1,)](
        table, len(table), *[rectangles.TRITON_TYPES[torch.int64]] * 2,
        UNIT=unit, FIELDS=rectangles.FIELDS, TILE=rectangles.TILE, STEPS=rectangles.STEPS,
        TURNS=1, num_warps=rectangles.WARPS,
    )  # fmt: skip
    values = [table, len(table), *[rectangles.TRITON_TYPES[torch.int64]] * 2, unit]
    values += [rectangles.FIELDS, rectangles.TILE, rectangles.STEPS, 1]
    runner = kernel[(1, 1, 1)]
    things["Triton, compiled kernel"] = lambda: runner(*values)
    handle = aside.cuda_stream
    things["Triton, compiled kernel on another stream"] = lambda: runner(*values, stream=handle)
    return {name: timed(run, repeats)["host_us"] for name, run in things.items()}


if __name__ == "__main__":
    main()
