"""How far this rank's clock is from rank 0's, by pings over gloo.

Who waits for whom: every rank calls `clock_offset`; rank 0 answers the pings of one rank after the
other, the others wait for their turn.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from hybridrl.parallel.groups import World

PINGS = 16  # the fastest counts, so that waiting for a turn, or for a core, does not


def clock_offset(world: World, now: Callable[[], float]) -> tuple[float, float]:
    """Returns what to add to this rank's clock to have rank 0's, and the largest error, seconds.

    The answer to a ping is taken to be given halfway between its two ends (Cristian 1989,
    "Probabilistic clock synchronization", eq. 1); the error is at most half of the round trip.

    Args:
        world: all ranks.
        now: reads this rank's clock.
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
