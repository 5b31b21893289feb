"""Finds where a change of phases spends its time: the driver's calls, vLLM's sleep by piece.

    python benchmarks/bench_phases.py OUT.json                 # memory and engine; one GPU
    python benchmarks/bench_phases.py OUT.json --parts memory  # without vLLM
    torchrun --nproc-per-node=2 benchmarks/bench_phases.py OUT.json --parts trainer

* memory: what it takes to make, map, allow, unmap and release memory, by size of its pieces; to
  move pieces to other addresses; to read and write memory that is mapped at two addresses; the
  same calls beside copies and on a second thread; torch's allocations and their return; memory set
  to zero.
* causes: why making an engine's memory takes long, one cause at a time (phase_causes.py).
* engine: a vLLM engine of 7B with dummy weights and a KV cache of --kv-gib goes to sleep and wakes
  up, with gradients of --gradient-gib given back and made again beside it: `ms` by vLLM's sleep,
  `lent` by the adapter's, with gradients in memory that the engine lends. First it is proven that
  100 changes leave as much memory free, and that the engine then draws the tokens that it drew
  before, from weights that are written anew, whatever gradients have left behind.
* trainer: `to_train` and `to_rollout` of a Trainer with random weights, by piece; 7B from tensor
  parallel over all ranks to replicas of one; of another engine with --set rollout.engine=NAME.

Milliseconds are medians of --repeats on the host's clock, the device idle before and after, on rank
0. A piece's time contains that of pieces inside it; `calls` are those of one change.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from case_record import commit
from phase_causes import causes
from phase_pieces import Pieces, lent_gradients, medians, milliseconds, watch_adapter

from hybridrl.parallel.device_mapping import DeviceMapping
from hybridrl.rollout.common.engine_memory import EnginePiece
from hybridrl.rollout.vllm.memory import allocations

ROOT = Path(__file__).resolve().parents[1]
GIB = 1 << 30
MIB = 1 << 20
# Sizes of pieces, and how much of them is mapped together: many small ones take long.
PIECES = {
    2 * MIB: 2 * GIB,
    32 * MIB: 8 * GIB,
    256 * MIB: 16 * GIB,
    GIB: 16 * GIB,
    16 * GIB: 16 * GIB,
}


def main() -> None:
    """Measures the parts that are asked for and writes OUT.json anew after each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--parts", nargs="+", default=["memory", "engine"], choices=[*PARTS])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kv-gib", type=float, default=11.0)
    parser.add_argument("--gradient-gib", type=float, default=14.0)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    report: dict[str, Any] = {
        "benchmark": "changes of phase",
        "command": "python " + " ".join([Path(sys.argv[0]).name, *sys.argv[2:]]),
        "commit": commit(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    for part in arguments.parts:
        began = time.perf_counter()
        report[part] = PARTS[part](arguments)
        report[part]["whole_part_s"] = round(time.perf_counter() - began, 1)
        if int(os.environ.get("RANK", "0")) == 0:
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            print(json.dumps(report[part], indent=1), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the system frees memory faster than vLLM and NCCL end


# Memory


def memory(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures the driver's and torch's calls."""
    mapping = DeviceMapping(torch.device("cuda", torch.cuda.current_device()))
    found: dict[str, Any] = {"pieces": {}}
    for piece, total in PIECES.items():
        rounds = [in_pieces(mapping, piece, total) for _ in range(arguments.repeats + 1)]
        per_gib = {name: ms / (total / GIB) for name, ms in medians(rounds).items()}
        found["pieces"][f"{piece // MIB} MiB"] = {
            "gib": total / GIB,
            "ms_per_gib": {name: round(ms, 4) for name, ms in per_gib.items()},
        }
    found["twice_mapped"] = twice_mapped(mapping)
    found["beside_copies"] = medians([beside_copies(mapping) for _ in range(arguments.repeats + 1)])
    found["torch"] = medians([torch_memory() for _ in range(arguments.repeats + 1)])
    return found


def in_pieces(mapping: DeviceMapping, piece: int, total: int) -> dict[str, float]:
    """Makes and maps memory in pieces, moves it, and gives it back; each call's part in ms."""
    places = range(0, total, piece)
    one, other, third = (mapping.reserve(total) for _ in range(3))
    handles: list[int] = []

    def create() -> None:
        handles.extend(mapping.create(piece) for _ in places)

    def map_at(start: int) -> None:
        for offset, handle in zip(places, handles, strict=True):
            mapping.map(start + offset, piece, handle)

    def allow_each(start: int) -> None:
        for offset in places:
            mapping.allow(start + offset, piece)

    def unmap_each(start: int) -> None:
        for offset in places:
            mapping.unmap(start + offset, piece)

    def release() -> None:
        for handle in handles:
            mapping.release(handle)

    found = {
        "create": milliseconds(create),
        "map": milliseconds(partial(map_at, one)),
        "allow each": milliseconds(partial(allow_each, one)),
    }
    mapping.tensor(one, total).fill_(1)
    found |= {
        "unmap each": milliseconds(partial(unmap_each, one)),
        "map again": milliseconds(partial(map_at, other)),
        "allow at once": milliseconds(partial(mapping.allow, other, total)),
        "unmap at once": milliseconds(partial(mapping.unmap, other, total)),
    }
    map_at(one)
    mapping.allow(one, total)
    map_at(third)
    found |= {
        "allow the second address": milliseconds(partial(mapping.allow, third, total)),
        "unmap the second address": milliseconds(partial(mapping.unmap, third, total)),
    }
    mapping.unmap(one, total)
    found["release"] = milliseconds(release)
    for start in (one, other, third):
        mapping.free(start, total)
    return found


def twice_mapped(mapping: DeviceMapping) -> dict[str, Any]:
    """Maps memory at two addresses for good: is what one writes what the other reads, how fast?"""
    size = 4 * GIB
    handle, one, other = mapping.create(size), mapping.reserve(size), mapping.reserve(size)
    for start in (one, other):
        mapping.map(start, size, handle)
        mapping.allow(start, size)
    first, second = mapping.tensor(one, size), mapping.tensor(other, size)
    aside = torch.empty_like(first[: size // 2])
    is_same = True
    for number in range(1, 9):  # by kernels and by copy engines, both ways
        writer, reader = (first, second) if number % 2 else (second, first)
        writer.fill_(number)
        is_same &= bool((reader == number).all())
        aside.fill_(100 + number)
        reader[: size // 2].copy_(aside)
        is_same &= bool((writer[: size // 2] == 100 + number).all())
    plain = torch.empty_like(first)
    rates = {}
    for name, tensor in (("once", plain), ("first", first), ("second", second)):
        tensor.zero_()
        rates[f"zero GB/s, {name}"] = round(size / milliseconds(tensor.zero_) / 1e6, 1)
        copy = partial(tensor[: size // 2].copy_, aside)
        rates[f"copy GB/s, {name}"] = round(size / milliseconds(copy) / 1e6, 1)
    del first, second
    for start in (one, other):
        mapping.unmap(start, size)
        mapping.free(start, size)
    mapping.release(handle)
    return {"what one writes the other reads": is_same, **rates}


def beside_copies(mapping: DeviceMapping) -> dict[str, float]:
    """Unmaps and maps while the device copies, on this thread and on another."""
    size, total = 256 * MIB, 8 * GIB
    places = range(0, total, size)
    start, other = mapping.reserve(total), mapping.reserve(total)
    handles = [mapping.create(size) for _ in places]
    source, dest = (torch.empty(4 * GIB, dtype=torch.uint8, device=mapping.device) for _ in "sd")

    def lay(where: int) -> None:
        for offset, handle in zip(places, handles, strict=True):
            mapping.map(where + offset, size, handle)
        mapping.allow(where, total)

    def copies() -> None:
        for _ in range(16):
            dest.copy_(source)

    def aside() -> None:
        mapping.unmap(start, total)
        lay(other)

    lay(start)
    found = {"copies alone": milliseconds(copies)}
    torch.cuda.synchronize()
    copies()
    began = time.perf_counter()
    mapping.unmap(start, total)
    found["unmap 8 GiB, copies under way"] = 1e3 * (time.perf_counter() - began)
    began = time.perf_counter()
    lay(other)
    found["map 8 GiB, copies under way"] = 1e3 * (time.perf_counter() - began)
    torch.cuda.synchronize()
    mapping.unmap(other, total)
    lay(start)
    thread = threading.Thread(target=aside)

    def together() -> None:
        copies()
        thread.start()
        thread.join()

    found["copies with both on a thread"] = milliseconds(together)
    mapping.unmap(other, total)
    for handle in handles:
        mapping.release(handle)
    for where in (start, other):
        mapping.free(where, total)
    return found


def torch_memory() -> dict[str, float]:
    """Torch's allocations of the size of gradients: from the driver, and back to it."""
    found: dict[str, float] = {}
    found["empty_cache, nothing cached"] = milliseconds(torch.cuda.empty_cache)
    found["gc.collect"] = milliseconds(gc.collect)
    found["synchronize"] = milliseconds(torch.cuda.synchronize)
    for gib in (1, 4, 15):
        tensor = torch.empty(0, dtype=torch.uint8, device="cuda")
        allocate = partial(tensor.untyped_storage().resize_, gib * GIB)
        found[f"allocate {gib} GiB"] = milliseconds(allocate)
        tensor.set_(tensor.untyped_storage(), 0, (gib * GIB,), (1,)).zero_()
        found[f"zero {gib} GiB"] = milliseconds(tensor.zero_)
        tensor.untyped_storage().resize_(0)
        found[f"give {gib} GiB back"] = milliseconds(torch.cuda.empty_cache)
    many = [torch.empty(64 * MIB, dtype=torch.uint8, device="cuda") for _ in range(128)]
    del many
    found["give 128 x 64 MiB back"] = milliseconds(torch.cuda.empty_cache)
    return found


def watch_vllm(pieces: Pieces) -> None:
    """Times what vLLM's sleep and its waking up are made of."""
    from vllm.device_allocator import cumem
    from vllm.v1.worker.gpu_worker import Worker

    pieces.watch(cumem, "unmap_and_release")
    pieces.watch(cumem, "create_and_map")
    pieces.watch(cumem.CuMemAllocator, "sleep", "allocator.sleep")
    pieces.watch(cumem.CuMemAllocator, "wake_up", "allocator.wake_up")
    pieces.watch(Worker, "sleep", "worker.sleep")
    pieces.watch(Worker, "wake_up", "worker.wake_up")
    pieces.watch(gc, "collect", "gc.collect")
    pieces.watch(torch.cuda, "empty_cache")
    pieces.watch(torch.cuda, "synchronize")


def summary(pieces: Iterable[EnginePiece]) -> dict[str, Any]:
    """Returns, by tag, how many pieces an engine's memory has and how large they are."""
    found: dict[str, list[int]] = {}
    for one in pieces:
        found.setdefault(one.tag, []).append(one.num_bytes)
    return {
        tag: {"count": len(sizes), "gib": round(sum(sizes) / GIB, 2), "largest": max(sizes) // MIB}
        for tag, sizes in found.items()
    }


# The engine alone


def engine(arguments: argparse.Namespace) -> dict[str, Any]:
    """A vLLM engine beside gradients that come and go."""
    from vllm import LLM

    model = json.loads((ROOT / "benchmarks" / "models" / "qwen2.5-7b.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(model | {"num_hidden_layers": arguments.layers})
        (Path(folder) / "config.json").write_text(text)
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="bfloat16",
            enforce_eager=True,
            enable_sleep_mode=True,
            max_model_len=1024,
            max_num_seqs=256,
            kv_cache_memory_bytes=int(arguments.kv_gib * GIB),
            gpu_memory_utilization=0.5,
        )
    pieces = Pieces()
    watch_vllm(pieces)
    size = int(arguments.gradient_gib * GIB)
    gradients: list[torch.Tensor] = []
    rounds = []
    for _ in range(arguments.repeats + 1):
        with pieces.piece("to_train"):
            with pieces.piece("sleep"):
                llm.sleep(level=2)
            with pieces.piece("gradients made"):
                gradients.append(torch.zeros(size, dtype=torch.uint8, device="cuda"))
        with pieces.piece("to_rollout"):
            with pieces.piece("gradients given back"):
                gradients.clear()
                torch.cuda.empty_cache()
            with pieces.piece("weights woken up"):
                llm.wake_up(tags=["weights"])
            with pieces.piece("KV cache woken up"):
                llm.wake_up(tags=["kv_cache"])
            with pieces.piece("prefix cache reset"):
                llm.reset_prefix_cache()
        rounds.append(pieces.take())
    pieces.stop()
    lent = lent_gradients(llm, size, arguments.repeats)
    return {"allocations": summary(allocations()), "ms": medians(rounds), "lent": lent}


# A Trainer


def trainer(arguments: argparse.Namespace) -> dict[str, Any]:
    """Both changes of a Trainer over all ranks, tensor parallel into replicas of one rank."""
    from reshard_gpu_case import config_of

    from hybridrl.hybrid_engine import engine as hybrid_engine
    from hybridrl.loop.trainer import Trainer
    from hybridrl.training.memory import TrainedModelMemory

    model = json.loads((ROOT / "benchmarks" / "models" / "qwen2.5-7b.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.json"
        file.write_text(json.dumps(model | {"num_hidden_layers": arguments.layers}))
        job = {"folder": folder, "model": str(file), "kind": "plain", "rollout": {"tp": 1}}
        job |= {
            "placement": {},
            "train": {"tp": int(os.environ["WORLD_SIZE"])},
            "set": arguments.set,
        }
        made = Trainer.from_config(
            config_of(job), prompts=[{"prompt": "1", "answer": ""}], reward=lambda *_: 0.0
        )
        made.reshard()
        pieces = Pieces()
        watch_adapter(pieces)
        pieces.watch(hybrid_engine, "_give_blocks_back", "training: blocks given back")
        pieces.watch(hybrid_engine.HybridEngine, "_move", "transfer")
        pieces.watch(TrainedModelMemory, "release", "training: release")
        pieces.watch(TrainedModelMemory, "restore", "training: restore")
        for name in ("sleep", "begin_update", "finish_update"):
            pieces.watch(type(made.engine), name, f"engine: {name}")
        rounds = []
        for _ in range(arguments.repeats + 1):
            with pieces.piece("to_train"):
                made.hybrid_engine.to_train()
            with pieces.piece("to_rollout"):
                made.hybrid_engine.to_rollout()
            rounds.append(pieces.take())
        pieces.stop()
        sizes = {name: holding.num_bytes for name, holding in made.engine.memory().items()}
    trained = made.policy.model.memory
    return {
        "allocations": summary(made.engine._memory.pieces),
        "engine_bytes": sizes,
        "gradient_bytes": 0 if trained is None else trained.gradient_bytes(),
        "lent_bytes": 0 if trained is None else trained.lent_bytes,
        "ms": medians(rounds),
    }


PARTS = {"memory": memory, "causes": causes, "engine": engine, "trainer": trainer}

if __name__ == "__main__":
    main()
