"""Reads files in several threads. Does not import torch.

Their work is reading, digesting and copying, all of which release Python's lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

# At least: digests of some pieces are computed while others are read from a disk. At most: beyond
# them the memory's bandwidth bounds, and Python between two blocks.
LEAST_THREADS, MOST_THREADS = 4, 16


def reading_threads(num_ranks: int = 1) -> int:
    """Returns a rank's number of reading threads: its share of the cores, within bounds.

    Args:
        num_ranks: Number of ranks on this host that read at the same time.
    """
    share = len(os.sched_getaffinity(0)) // num_ranks
    return min(max(share, LEAST_THREADS), MOST_THREADS)


def in_threads(calls: Iterable[Callable[[], object]], num_threads: int) -> None:
    """Makes all calls in several threads, begun in order.

    Raises:
        Exception: The first in order that fails; calls that have not begun are not made.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        begun = [pool.submit(call) for call in calls]
        try:
            for done in begun:
                done.result()
        finally:
            for done in begun:
                done.cancel()
