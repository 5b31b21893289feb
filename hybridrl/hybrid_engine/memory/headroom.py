"""Decides whether the device has room for training and rollout at the same time.

Unmapping an engine's memory and allocating everything again takes a few tenths of a second per
step. If the peak of a whole training step leaves enough memory for the engine, both stay allocated.
torch's allocator keeps its memory until `empty_cache`, so what the driver reports as free after an
update is what training never used. The further need of updates with full micro-batches is reserved,
because an engine that stays allocated cannot make room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Shares of the device's memory that must remain free with both phases allocated. Keeping both
# starts once SPARE_SHARE would be free, because memory use varies between batches, and stops when
# less than LEAST_SHARE would be free.
SPARE_SHARE, LEAST_SHARE = 0.10, 0.05


def device_memory() -> tuple[int, int] | None:
    """Returns free and total bytes of this rank's device; None on CPU, where nothing is freed."""
    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None


def allocator_flushes() -> int:
    """Returns how often torch's allocator ran out of memory, freed its cache and retried."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


class Headroom:
    """Decides before each phase change whether the memory of both phases stays allocated.

    All ranks decide from the `spare_bytes` of all ranks, so they reach the same decision.

    Attributes:
        is_enough: Whether the next phase change frees no memory.
    """

    def __init__(
        self,
        measure: Callable[[], tuple[int, int] | None] = device_memory,
        count_flushes: Callable[[], int] = allocator_flushes,
    ) -> None:
        self._measure, self._count_flushes = measure, count_flushes
        self.is_enough = False
        self._unused: int | None = None  # bytes that training never used
        self._before_engine = 0
        self._was_disturbed = False  # whether something other than an update used the device
        self._num_flushes = 0

    def measure_training(self, may_stay: bool, growth_bytes: int = 0) -> None:
        """Measures the memory that training never used. Must be called before any memory is freed.

        Args:
            may_stay: Whether the configuration allows training memory to stay allocated, and a full
                update has run since it was last freed.
            growth_bytes: How much full micro-batches would raise the peak of this update.
        """
        found, flushes = self._measure(), self._count_flushes()
        is_known = not self._was_disturbed and flushes == self._num_flushes
        self._was_disturbed, self._num_flushes = False, flushes
        self._unused = None
        if found is not None and may_stay and is_known:
            self._unused = found[0] - growth_bytes

    def measure_freed(self) -> None:
        """Measures free memory after training frees its memory and before the engine allocates."""
        found = self._measure()
        self._before_engine = found[0] if found is not None else 0

    def reset(self) -> None:
        self.is_enough, self._was_disturbed = False, True

    def spare_bytes(self) -> int:
        """Returns how many bytes more than required would be free with both phases allocated.

        Negative if insufficient or unknown. All of the engine's memory must be allocated.
        """
        found = self._measure()
        if found is None or self._unused is None:
            return -1
        free, size = found
        if self.is_enough:  # `_unused` was measured with the engine allocated
            return self._unused - int(LEAST_SHARE * size)
        return self._unused - (self._before_engine - free) - int(SPARE_SHARE * size)

    def decide(self, spare_bytes: Sequence[int]) -> None:
        """Sets `is_enough` from the `spare_bytes` of all ranks."""
        self.is_enough = min(spare_bytes) >= 0
