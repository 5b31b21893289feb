"""Determines how many processor cores a rank may use. No torch."""

from __future__ import annotations

import os


def cores_of_rank(num_ranks: int) -> int:
    """Returns a rank's share of its host's cores.

    It is at most the number of cores that the scheduler allows this process, because each rank may
    already be bound to its own share.
    """
    return min((os.cpu_count() or 1) // num_ranks, len(os.sched_getaffinity(0)))
