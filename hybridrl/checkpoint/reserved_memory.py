"""Allocates page-locked memory in the background during training, before it is needed.

CUDA's own allocation takes half a second per GiB or more, mostly for the operating system to
provide the pages. Here, threads first touch the pages of ordinary memory, and CUDA locks them
afterwards. `tensor` waits for the threads. The threads of a second range wait for those of the
first, which is needed sooner. Invariant: a range is unlocked before its memory is freed.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from hybridrl.parallel.host_cores import cores_of_rank

CHUNK_BYTES = 64 << 20  # size of the pieces that are divided among the threads
MOST_THREADS, LEAST_THREADS = 8, 2
_TURN = threading.Lock()  # lock held while a range's pages are being touched


def threads_beside_training(num_ranks: int) -> int:
    """Returns the number of threads that move memory during training: half of a rank's cores."""
    return min(max(cores_of_rank(num_ranks) // 2, LEAST_THREADS), MOST_THREADS)


class ReservedMemory:
    """A range of memory that threads touch, and that `lock`, in the background, page-locks at an
    address. Raises OSError if the operating system does not allow the process this much memory.
    """

    def __init__(
        self,
        num_bytes: int,
        num_threads: int,
        lock: Callable[[int, int], None],
        unlock: Callable[[int], object],
    ) -> None:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages are faster to touch and lock. MADV_DONTFORK, because a forked child would
        # otherwise copy pages that a device may be writing to.
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):
            with suppress(OSError):  # not every kernel supports both
                pages.madvise(advice)
        self._memory: np.ndarray[Any, np.dtype[np.uint8]] = np.frombuffer(pages, np.uint8)
        self._num_threads, self._lock, self._unlock = num_threads, lock, unlock
        self._is_locked = False
        self._taken: list[int] = []  # sizes of the chunks touched so far
        self._thread = threading.Thread(target=self._work, name="locked memory", daemon=True)
        self._thread.start()

    def tensor(self) -> torch.Tensor | None:
        """Waits until the memory is page-locked and returns it (uint8); None if that failed."""
        self._thread.join()
        return torch.from_numpy(self._memory) if self._is_locked else None

    @property
    def num_taken(self) -> int:
        return sum(self._taken)

    def _work(self) -> None:
        with _TURN:
            starts = range(0, len(self._memory), CHUNK_BYTES)
            chunks = [self._memory[start : start + CHUNK_BYTES] for start in starts]
            parts = [chunks[number :: self._num_threads] for number in range(self._num_threads)]
            threads = [
                threading.Thread(target=_touch, args=(part, self._taken), daemon=True)
                for part in parts
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            address = self._memory.ctypes.data
            with suppress(RuntimeError):  # after a failure, callers allocate through CUDA
                self._lock(address, len(self._memory))
                weakref.finalize(self, self._unlock, address)
                self._is_locked = True


def _touch(chunks: Sequence[np.ndarray[Any, np.dtype[np.uint8]]], taken: list[int]) -> None:
    """Writes to all pages without the interpreter lock, and records the number of bytes touched."""
    for chunk in chunks:
        chunk.fill(0)
        taken.append(len(chunk))
