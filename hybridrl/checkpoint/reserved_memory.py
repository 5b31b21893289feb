"""Page-locked memory that is allocated during training, before it is needed.

CUDA allocates page-locked memory in one thread, and the process waits for half a second a GiB or
more, most of it until the system has provided the pages. Here several threads touch the pages of
ordinary memory, and CUDA locks them afterwards.

Who waits for whom: `tensor` waits for the threads; those of a second range wait for those of the
first, which is needed sooner. Invariant: a range is unlocked before the process frees it.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

CHUNK_BYTES = 64 << 20  # whose pages a thread takes at a time
MOST_THREADS, LEAST_THREADS = 8, 2
_TURN = threading.Lock()  # of the range whose pages are being taken


def threads_beside_training(num_ranks: int) -> int:
    """Returns a rank's number of threads that move memory in training: half of its processors."""
    own = min((os.cpu_count() or 1) // num_ranks, len(os.sched_getaffinity(0)))
    return min(max(own // 2, LEAST_THREADS), MOST_THREADS)


class ReservedMemory:
    """A range of memory whose pages threads touch and lock.

    Args:
        num_bytes: Size of the range.
        num_threads: Number of threads that touch its pages.
        lock: Page-locks an address and a number of bytes, on one of the threads.
        unlock: Unlocks the range at an address.

    Raises:
        OSError: The process may not have so much memory.
    """

    def __init__(
        self,
        num_bytes: int,
        num_threads: int,
        lock: Callable[[int, int], None],
        unlock: Callable[[int], object],
    ) -> None:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages are taken and locked sooner. A child that is forked would get copies of pages
        # that a device may write to.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with suppress(OSError):  # not every kernel has both
                pages.madvise(advice)
        self._memory: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(pages, np.uint8)
        self._num_threads, self._lock, self._unlock = num_threads, lock, unlock
        self._is_locked = False
        self._taken: list[int] = []  # bytes of chunks that have their pages
        self._thread = threading.Thread(target=self._work, name="locked memory", daemon=True)
        self._thread.start()

    def tensor(self) -> torch.Tensor | None:
        """Returns the memory, uint8, once it is page-locked; None if it cannot be."""
        self._thread.join()
        return torch.from_numpy(self._memory) if self._is_locked else None

    @property
    def num_taken(self) -> int:
        """Number of bytes that have pages so far."""
        return sum(self._taken)

    def _work(self) -> None:
        """Body of the thread: touches the pages and locks them."""
        with _TURN:
            self._take()

    def _take(self) -> None:
        starts = range(0, len(self._memory), CHUNK_BYTES)
        chunks = [self._memory[start : start + CHUNK_BYTES] for start in starts]
        parts = [chunks[number :: self._num_threads] for number in range(self._num_threads)]
        threads = [
            threading.Thread(target=_touch, args=(part, self._taken), daemon=True) for part in parts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        address = self._memory.ctypes.data
        with suppress(RuntimeError):  # CUDA's own memory is taken then, where it is asked for
            self._lock(address, len(self._memory))
            weakref.finalize(self, self._unlock, address)
            self._is_locked = True


def _touch(chunks: Sequence[np.ndarray[Any, np.dtype[np.uint8]]], taken: list[int]) -> None:
    """Writes to all pages without the interpreter lock, and records the bytes that have pages."""
    for chunk in chunks:
        chunk.fill(0)
        taken.append(len(chunk))
