"""Measures how far rank 0's clock is ahead, by pings over gloo to one rank after another."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from hybridrl.parallel.groups import World

PINGS = 16  # only the fastest is used, which waited for no core


def clock_offset(world: World, now: Callable[[], float]) -> tuple[float, float]:
    """Returns the seconds by which rank 0's clock is ahead of `now`, and the largest error.

    Assumes that rank 0 reads its clock halfway through the round trip (Cristian 1989,
    "Probabilistic clock synchronization", eq. 1), so the error is at most half of it.
    """
    group, time_1 = world.cpu_group, torch.zeros(1, dtype=torch.float64)
    if world.rank == 0:
        for rank in range(1, world.size):
            for _ in range(PINGS):
                dist.recv(time_1, rank, group=group)
                time_1[0] = now()
                dist.send(time_1, rank, group=group)
        return 0.0, 0.0
    found = []
    for _ in range(PINGS):
        began = now()
        dist.send(time_1, 0, group=group)
        dist.recv(time_1, 0, group=group)
        ended = now()
        found.append(((ended - began) / 2, float(time_1) - (began + ended) / 2))
    error, offset = min(found)
    return offset, error
