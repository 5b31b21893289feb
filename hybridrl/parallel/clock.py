"""Offset between this rank's clock and rank 0's, measured by pings over gloo.

Who waits for whom: every rank calls `clock_offset`. Rank 0 answers the pings of one rank after
another; the other ranks wait for their turn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from hybridrl.parallel.groups import World

PINGS = 16  # only the fastest counts, which excludes waits for a turn or for a CPU core


def clock_offset(world: World, now: Callable[[], float]) -> tuple[float, float]:
    """Returns the seconds to add to this rank's clock to get rank 0's, and the largest error.

    The method assumes that rank 0 answers halfway through the round trip (Cristian 1989,
    "Probabilistic clock synchronization", eq. 1). The error is at most half of the round trip.

    Args:
        now: Function that reads this rank's clock.
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
