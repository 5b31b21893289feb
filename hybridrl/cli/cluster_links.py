"""Rates of links between nodes, by gloo and, with GPUs, by NCCL. Imports torch where it measures.

Collective: every node calls `measure` with the same schedule. A pair that takes no part waits for
nobody; rounds are kept apart by barriers. The store is on the first node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LIMIT_S = 60.0
SMALL_BYTES, LARGE_BYTES = 1 << 20, 64 << 20
GPU_BYTES = 512 << 20
SLOW_S = 0.05  # a small message that takes longer is measure enough: 20 MB/s
REPEATS = 3


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Returns all pairs of `count` players in rounds in which each plays at most once (the circle
    method of tournaments).
    """
    players = list(range(count + count % 2))
    found = []
    for _ in range(max(0, len(players) - 1)):
        half = len(players) // 2
        pairs = zip(players[:half], reversed(players[half:]), strict=True)
        found.append([(min(p), max(p)) for p in pairs if max(p) < count])
        players = [players[0], players[-1], *players[1:-1]]
    return found


def measure(
    index: int, count: int, address: str, port: int, interface: str, num_gpus: int
) -> dict[str, Any]:
    """Measures gloo between nodes, NCCL between them and between the node's GPUs.

    Args:
        index: this node's number.
        count: nodes.
        address, port: of the store, on node 0.
        interface: of this node to the others.
        num_gpus: of this node that torch can use; NCCL is measured where every node has some.

    Returns:
        `pairs`: [first, second, backend, GB/s] of those in which this node is the first;
        `local`: [gpu, gpu, GB/s]; `all_reduce`: [backend, GB/s, fault].
    """
    import torch
    from torch import distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    limit = timedelta(seconds=LIMIT_S)
    store = dist.TCPStore(address, port, count, index == 0, limit)
    dist.init_process_group("gloo", store=store, rank=index, world_size=count, timeout=limit)
    found: dict[str, Any] = {"pairs": [], "all_reduce": [], "local": local_rates(num_gpus)}
    try:
        counts = torch.tensor([num_gpus])
        dist.all_reduce(counts, dist.ReduceOp.MIN)
        backends = ["gloo", *(["nccl"] if int(counts) and count > 1 else [])]
        for backend in backends:
            device = "cuda:0" if backend == "nccl" else "cpu"
            group = dist.new_group(backend=backend, timeout=limit)
            found["all_reduce"].append([backend, *_all_reduce(group, count, device)])
            for number, pairs in enumerate(rounds(count)):
                dist.barrier()
                for first, second in pairs:
                    if index in (first, second):
                        rate = _pair(group, index, first, second, device, number)
                        found["pairs"] += [[first, second, backend, rate]] if index == first else []
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return found


def _all_reduce(group: Any, count: int, device: str) -> tuple[float, str]:
    """Returns GB/s of an all-reduce, counted as each rank's bytes by time, and what was wrong."""
    import torch
    from torch import distributed as dist

    num_bytes = SMALL_BYTES if device == "cpu" else GPU_BYTES

    def once() -> tuple[float, float]:
        block = torch.ones(num_bytes // 4, device=device)
        begin = _now(device)
        dist.all_reduce(block, group=group)
        return _now(device) - begin, float((block - count).abs().max())

    once()
    seconds, wrong = once()
    return num_bytes / seconds / 1e9, f"the sum is off by {wrong:g}" if wrong else ""


def _pair(group: Any, index: int, first: int, second: int, device: str, tag: int) -> float:
    """Returns GB/s of the slower direction, by messages that are answered with one byte."""
    import torch
    from torch import distributed as dist

    other = second if index == first else first

    def exchange(block: Tensor, source: int) -> float:
        """Sends a block from `source` and an answer back; returns the time."""
        token = torch.zeros(1, device=device)
        begin = _now(device)
        if index == source:
            dist.send(block, other, group=group, tag=tag)
            dist.recv(token, other, group=group, tag=tag)
        else:
            dist.recv(block, other, group=group, tag=tag)
            dist.send(token, other, group=group, tag=tag)
        return _now(device) - begin

    def rate(source: int) -> float:
        size = SMALL_BYTES
        small = torch.zeros(size, dtype=torch.uint8, device=device)
        exchange(small, source)  # connections are made by the first message
        told = torch.tensor([min(exchange(small, source) for _ in range(2))], device=device)
        exchange(told, source)  # both go by the sender's time
        seconds = float(told)
        if seconds < SLOW_S:
            size = LARGE_BYTES if device == "cpu" else GPU_BYTES
            large = torch.zeros(size, dtype=torch.uint8, device=device)
            seconds = min(exchange(large, source) for _ in range(REPEATS))
        return size / seconds / 1e9

    return min(rate(first), rate(second))


def _now(device: str) -> float:
    import torch

    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter()


def local_rates(num_gpus: int) -> list[tuple[int, int, float]]:
    """Returns (gpu, gpu, GB/s) of copies between every two GPUs of this node."""
    import torch

    found = []
    for pairs in rounds(num_gpus):
        for first, second in pairs:
            source = torch.zeros(GPU_BYTES, dtype=torch.uint8, device=f"cuda:{first}")
            target = torch.empty_like(source, device=f"cuda:{second}")
            found.append((first, second, GPU_BYTES / _copy_s(source, target) / 1e9))
    return found


def _copy_s(source: Tensor, target: Tensor) -> float:
    import torch

    def timed(act: Callable[[], object]) -> float:
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(target.device)
        begin = time.perf_counter()
        act()
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(target.device)
        return time.perf_counter() - begin

    timed(lambda: target.copy_(source))
    return min(timed(lambda: target.copy_(source)) for _ in range(REPEATS))
