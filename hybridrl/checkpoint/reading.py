"""Reads files in threads: reading, digesting and copying release Python's lock. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from hybridrl.parallel.host_cores import cores_of_rank

# With at least LEAST_THREADS, some threads compute digests while others wait for a disk. More than
# MOST_THREADS are not faster, because memory bandwidth and the interpreter lock are the limit.
LEAST_THREADS, MOST_THREADS = 4, 16


def reading_threads(num_ranks: int = 1) -> int:
    """Returns the threads with which a rank reads: its share of the cores, within bounds."""
    return min(max(cores_of_rank(num_ranks), LEAST_THREADS), MOST_THREADS)


def in_threads(calls: Iterable[Callable[[], object]], num_threads: int) -> None:
    """Runs all calls in several threads, in the given order. Raises the error of the first call, in
    this order, that failed. After a failure, no further call starts.
    """
    with ThreadPoolExecutor(num_threads) as pool:
        begun = [pool.submit(call) for call in calls]
        try:
            for done in begun:
                done.result()
        finally:
            for done in begun:
                done.cancel()
