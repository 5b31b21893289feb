"""Measures links over gloo or NCCL. Every rank calls `measure`; idle ranks wait at a barrier."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

LIMIT_S = 60.0
SMALL_BYTES = 1 << 20
LARGE_BYTES = {"gloo": 64 << 20, "nccl": 512 << 20}
SLOW_S = 0.05  # if a small message takes longer (20 MB/s), no large message is sent
REPEATS = 3


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Arranges all pairs of ranks in rounds with each rank at most once (circle method)."""
    players = list(range(count + count % 2))
    found = []
    for _ in range(max(0, len(players) - 1)):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(p), max(p)) for p in pairs if max(p) < count])
        players = [players[0], players[-1], *players[1:-1]]
    return found


def measure(store: Store, rank: int, size: int, has_gpus: bool) -> dict[str, Any]:
    """Measures links between ranks over gloo, and over NCCL if every rank has a GPU.

    Returns `all_reduce`: [backend, GB/s, error], and `pairs`: [first, second, backend, GB/s] for
    each pair in which this rank is the first.
    """
    import torch
    from torch import distributed as dist

    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    found: dict[str, Any] = {"all_reduce": [], "pairs": []}
    try:
        have_gpus = torch.tensor([int(has_gpus)])
        dist.all_reduce(have_gpus, dist.ReduceOp.MIN)
        for backend in ["gloo", *(["nccl"] if int(have_gpus) and size > 1 else [])]:
            group = dist.new_group(backend=backend, timeout=limit)
            found["all_reduce"].append([backend, *_all_reduce(group, backend, size)])
            for number, pairs in enumerate(rounds(size)):
                dist.barrier()
                for first, second in pairs:
                    if rank in (first, second):
                        other = second if rank == first else first
                        rate = partial(_rate, group, backend, rank, other, tag=number)
                        rates = [rate(source) for source in (first, second)]
                        if rank == first:
                            found["pairs"].append([first, second, backend, min(rates)])
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return found


def _all_reduce(group: ProcessGroup, backend: str, size: int) -> tuple[float, str]:
    import torch
    from torch import distributed as dist

    num_bytes = SMALL_BYTES if backend == "gloo" else LARGE_BYTES[backend]
    wrong, seconds = 0.0, float("inf")
    for _ in range(2):  # the first all-reduce connects the ranks
        block = torch.ones(num_bytes // 4, device=_device(backend))
        begin = _now(backend)
        dist.all_reduce(block, group=group)
        seconds = min(seconds, _now(backend) - begin)
        wrong = max(wrong, float((block - size).abs().max()))
    return num_bytes / seconds / 1e9, f"the sum is off by {wrong:g}" if wrong else ""


def _rate(group: ProcessGroup, backend: str, rank: int, other: int, source: int, tag: int) -> float:
    """Returns the GB/s of messages from `source`. The peer acknowledges each with one byte."""
    import torch
    from torch import distributed as dist

    device = _device(backend)

    def exchange(block: torch.Tensor) -> float:
        answer = torch.zeros(1, device=device)
        begin = _now(backend)
        if rank == source:
            dist.send(block, other, group=group, tag=tag)
            dist.recv(answer, other, group=group, tag=tag)
        else:
            dist.recv(block, other, group=group, tag=tag)
            dist.send(answer, other, group=group, tag=tag)
        return _now(backend) - begin

    size = SMALL_BYTES
    small = torch.zeros(size, dtype=torch.uint8, device=device)
    exchange(small)  # the first message connects the pair
    time_of_sender = torch.tensor([min(exchange(small) for _ in range(2))], device=device)
    exchange(time_of_sender)
    seconds = float(time_of_sender)
    if seconds < SLOW_S:
        size = LARGE_BYTES[backend]
        large = torch.zeros(size, dtype=torch.uint8, device=device)
        seconds = min(exchange(large) for _ in range(REPEATS))
    return size / seconds / 1e9


def _device(backend: str) -> str:
    return "cuda:0" if backend == "nccl" else "cpu"


def _now(backend: str) -> float:
    import torch

    if backend == "nccl":
        torch.cuda.synchronize()
    return time.perf_counter()
