"""Reading by several threads: how many of a rank, and what they do when one fails. No torch.

A thread's work is reading, digesting and copying, all of which leave Python's lock to the others.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

# At least: digests of some pieces are computed while others are read from a disk. At most: beyond
# them the memory's bandwidth bounds, and Python between two blocks.
LEAST_THREADS, MOST_THREADS = 4, 16


def reading_threads(num_ranks: int = 1) -> int:
    """Returns how many threads of a rank read at a time: its share of the cores, within bounds.

    Args:
        num_ranks: of this host that read at the same time.
    """
    share = len(os.sched_getaffinity(0)) // num_ranks
    return min(max(share, LEAST_THREADS), MOST_THREADS)


def in_threads(calls: Iterable[Callable[[], object]], num_threads: int) -> None:
    """Makes all calls, several at a time, in order.

    Raises:
        Exception: of the first in order that fails; those that have not begun are not made.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        begun = [pool.submit(call) for call in calls]
        try:
            for done in begun:
                done.result()
        finally:
            for done in begun:
                done.cancel()
