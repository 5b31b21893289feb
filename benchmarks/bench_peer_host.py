"""Times what one sync over peer memory asks of the host, part by part, without engine or trainer.

    torchrun --standalone --nproc-per-node=2 benchmarks/bench_peer_host.py OUT.json

Each rank holds the training tensors of a layout in peer memory and the engine's as plain tensors,
so that the plan, its tables and its copies are those of a run (PyTorch's allocator places the
engine's). All ways must bring the bits that lie there. `host_us` of a part is until its calls
return, `whole_us` of all of it, `device_ms` until the slowest rank's device is done: medians of
--repeats runs, each begun by all ranks with idle devices. `alone_us` is a batch of blocks queued by
itself on an idle device.

Ways: as_in_runs; kernels_one_by_one, not as graphs; every_address, where all tensors are asked
where they lie and not one of each storage; ctypes, blocks by the driver's API from Python; and
graph_of_blocks, the blocks as a CUDA graph of 16 chains side by side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from bench_copies import graph_of
from bench_planner import Layouts, dense, of_family
from case_record import command_of, commit
from hybridrl.kernels.copy_engine import BlockCopies, Stream, Waits

from hybridrl import ops
from hybridrl.hybrid_engine.planning.assign import assign
from hybridrl.hybrid_engine.planning.plan import plan_reshard
from hybridrl.hybrid_engine.transports import peer
from hybridrl.hybrid_engine.transports.peer import PeerTransport
from hybridrl.hybrid_engine.transports.repeated import Repeated
from hybridrl.models.weights import RankLayout
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.peer_memory import PeerMemory, allocate
from hybridrl.platform import Platform

ITEMSIZE, ALIGNMENT = 2, 256
LAYOUTS: dict[str, Callable[[int], Layouts]] = {
    "7b/tp2/tp1": lambda world: dense(TrainLayout(world, tp=2), 1),
    "7b/pp2/tp2": lambda world: dense(TrainLayout(world, pp=2), 2),
    "qwen3-30b-a3b/dp2ep2/tp2ep2": lambda world: of_family(
        "qwen3-30b-a3b", TrainLayout(world, ep=2), 2, 2
    ),
}
WAYS = ("as_in_runs", "kernels_one_by_one", "every_address", "ctypes", "graph_of_blocks")
OF_MIXTURES = WAYS[:3]  # which have few blocks or none
BRANCHES, FEW = 16, 1000  # chains of a graph; tensors of a dense model's engine
Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]


class GraphBlockCopies:
    """Blocks as a CUDA graph of chains side by side."""

    def __init__(self, pairs: Pairs, branches: int) -> None:
        self._graph = graph_of(list(pairs), branches, pairs[0][1].device) if pairs else None

    @property
    def num_launches(self) -> int:
        return int(self._graph is not None)

    def run(self, stream: Stream, first: Waits = (), then: Waits = ()) -> None:
        for waiting, awaited in first:
            waiting.wait_stream(awaited)
        if self._graph is not None:
            with torch.cuda.stream(stream):
                self._graph.replay()
        for waiting, awaited in then:
            waiting.wait_stream(awaited)


def main() -> None:
    """Measures all layouts; rank 0 writes OUT.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 60)
    world = World(platform, 60)
    report = {
        "benchmark": "host of a sync over peer memory",
        "command": command_of(sys.argv),
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cases": [measured(name, world, arguments.repeats) for name in LAYOUTS],
    }
    if world.rank == 0:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report, indent=1))
    stop_process_group()


def measured(name: str, world: World, repeats: int) -> dict[str, Any]:
    """Checks and times all ways of one layout; collective."""
    sources, parts = LAYOUTS[name](world.size)
    layout = assign(sources, parts, world.size).layout
    targets = [parts[tp_rank] for _, tp_rank in layout.assignment]
    plan = plan_reshard(sources, targets, ITEMSIZE, world.size)
    memory, own = in_peer_memory(sources, world)
    engine = engine_tensors(targets[world.rank], world.platform.device)
    found: dict[str, Any] = {"case": name, "tensors": len(engine), "ways": {}}
    wanted: dict[str, torch.Tensor] = {}
    for way in WAYS if len(engine) < FEW else OF_MIXTURES:
        with changed(way) as blocks:
            transport = PeerTransport(plan, world, own, engine, memory)
            if not wanted:  # each rectangle by itself
                torch.cuda.synchronize()  # all sources are there
                dist.barrier()
                for _, source, dest in transport._copies():
                    dest.copy_(source)
                wanted = {key: tensor.clone() for key, tensor in engine.items()}
            for tensor in engine.values():
                tensor.zero_()
            for _ in range(2):  # the second time kernels become graphs
                transport.run()
            torch.cuda.synchronize()
            for key, tensor in engine.items():
                if not torch.equal(tensor.view(torch.int16), wanted[key].view(torch.int16)):
                    raise RuntimeError(f"{name}, {way}: {key} has other bits")
            found["ways"][way] = timed(transport, world, repeats)
            transport.close()
        found["blocks"] = blocks
        if world.rank == 0:
            print(name, way, blocks, json.dumps(found["ways"][way]), flush=True)
    return found


@contextmanager
def changed(way: str) -> Iterator[list[int]]:
    """Lets transports that are made meanwhile work in a way; yields their numbers of blocks."""
    blocks: list[int] = []
    block_copies = ops.block_copies

    def made(pairs: Pairs, device: torch.device) -> Any:
        blocks.append(len(pairs))
        if way == "ctypes":
            return BlockCopies(pairs)
        if way == "graph_of_blocks":
            return GraphBlockCopies(pairs, BRANCHES)
        return block_copies(pairs, device)

    with ExitStack() as stack:
        stack.enter_context(patch.object(ops, "block_copies", made))
        if way == "kernels_one_by_one":
            stack.enter_context(patch.object(Repeated, "run", lambda self: self._queue()))
        if way == "every_address":
            stack.enter_context(patch.object(peer, "AddressWatch", EveryAddress))
        yield blocks


class EveryAddress:
    """In place of `transport.AddressWatch`: asks all tensors."""

    def __init__(self, *tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors, self._known = tensors, list[int]()

    def look_again(self) -> bool:
        now = [one.data_ptr() for group in self._tensors for one in group.values()]
        known, self._known = self._known, now
        return now != known


def engine_tensors(layout: RankLayout, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns zeros in an engine's shapes; the experts of a layer lie in two tensors."""
    of_tensor: dict[str, list[str]] = {}
    for key in layout.shapes:
        whole_name = key.rpartition("/")[0] if ".experts." in key else key
        of_tensor.setdefault(whole_name, []).append(key)
    made = {}
    for keys in of_tensor.values():
        shapes = [torch.Size(layout.shapes[key]) for key in keys]
        whole = torch.zeros(sum(s.numel() for s in shapes), dtype=torch.bfloat16, device=device)
        pieces = whole.split([shape.numel() for shape in shapes])
        made |= {k: p.view(s) for k, p, s in zip(keys, pieces, shapes, strict=True)}
    return {key: made[key] for key in layout.shapes}


def in_peer_memory(
    layouts: Sequence[RankLayout], world: World
) -> tuple[PeerMemory, dict[str, torch.Tensor]]:
    """Returns memory over all ranks, and this one's training tensors in it with random bits."""
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    sizes = []
    for rank, layout in enumerate(layouts):
        end = 0
        for key, shape in sorted(layout.shapes.items(), key=place_in_model, reverse=True):
            if rank == world.rank:
                places[key] = end, tuple(shape)
            end += -(-ITEMSIZE * torch.Size(shape).numel() // ALIGNMENT) * ALIGNMENT
        sizes.append(end)
    memory = allocate(max(sizes), world.platform.device, 60, world)
    own = memory.of(world.rank)
    own.view(torch.int16).random_(-100, 100)
    tensors = {}
    for key, (start, shape) in places.items():
        size = ITEMSIZE * torch.Size(shape).numel()
        tensors[key] = own[start : start + size].view(torch.bfloat16).view(shape)
    return memory, tensors


ORDER = ("linear_proj", "input_layernorm", "self_attention", "pre_mlp_layernorm", "fc1", "fc2")


def place_in_model(item: tuple[str, object]) -> tuple[int, int, str]:
    """Returns what sorts parameters as Megatron's Transformer Engine layers make them: its
    buffers hold them in reverse.
    """
    parts = item[0].split(".")
    if "layers" not in parts:
        return (-1 if "embedding" in item[0] else 10_000), 0, item[0]
    kind = next((number for number, part in enumerate(ORDER) if part in item[0]), len(ORDER))
    return int(parts[parts.index("layers") + 1]), kind, item[0]


def timed(transport: PeerTransport, world: World, repeats: int) -> dict[str, Any]:
    """Returns medians of rank 0's host, by part, and of the slowest rank's device."""
    spent: dict[str, list[float]] = {}
    names = ("to_staging", "direct", "last")
    for name, batch in zip(names, transport._batches, strict=True):
        watch(batch, name, spent, "run")
    watch(transport._watch, "addresses", spent, "look_again")
    watch(transport, "barrier and what is cut up", spent, "_cut_up")
    watch(transport, "local", spent, "_local")
    watch(transport, "unpack", spent, "_unpack")
    whole, device = [], []
    for _ in range(repeats + 3):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        dist.barrier()
        torch.cuda.synchronize()
        events[0].record()
        began = time.perf_counter()
        transport.run()
        whole.append(time.perf_counter() - began)
        events[1].record()
        torch.cuda.synchronize()
        device.append(events[0].elapsed_time(events[1]))
    in_sync = {key: microseconds(values[3:]) for key, values in spent.items()}
    alone: dict[str, list[float]] = {}
    for name, batch in zip(names, transport._batches, strict=True):
        alone[name] = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            began = time.perf_counter()
            batch.run(transport._engines)
            alone[name].append(time.perf_counter() - began)
    slowest = [max(both) for both in zip(*world.gather_objects(device[3:]), strict=True)]
    found = {
        "whole_us": microseconds(whole[3:]),
        "whole_p90_us": round(1e6 * sorted(whole[3:])[int(0.9 * repeats)], 1),
        "device_ms": round(statistics.median(slowest), 3),
        "host_us": in_sync,
        "alone_us": {key: microseconds(values) for key, values in alone.items()},
    }
    return found | {"of_ranks_us": world.gather_objects(found["whole_us"])}


def watch(owner: Any, name: str, spent: dict[str, list[float]], method: str) -> None:
    """Adds what each call of a method takes to `spent[name]`."""
    real = getattr(owner, method)

    def call(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return real(*args)
        finally:
            spent.setdefault(name, []).append(time.perf_counter() - began)

    setattr(owner, method, call)


def microseconds(values: Sequence[float]) -> float:
    return round(1e6 * statistics.median(values), 1)


if __name__ == "__main__":
    main()
