"""Whether the device has memory for training and rollout at once, so that neither must be freed.

To unmap an engine, to return blocks to the driver and to map and allocate all again takes some
tenths of a second a step. Where the most that a whole step of training held leaves enough for the
engine, both stay where they are. It is measured, not predicted: torch's allocator keeps what it
ever held until it is told to give it back, so after an update the driver's free memory is what
training never used. An update whose micro-batches were not full tells less. What full ones would
take beyond is set aside, since an engine that stays cannot make way for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Shares of the device's memory. The first must be free beside training and engine before both
# stay: batches differ, and so does what their passes need. With less than the second they no
# longer do.
SPARE_SHARE, LEAST_SHARE = 0.10, 0.05


def device_memory() -> tuple[int, int] | None:
    """Returns free and total bytes of this rank's device; None on CPU, where nothing is freed."""
    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None


def allocator_flushes() -> int:
    """Returns how often torch's allocator, out of memory, freed its cache and tried again."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


class Headroom:
    """Decides, from transition to transition, whether both phases' memory stays.

    Each rank measures its own `spare_bytes`; the numbers of all ranks decide together.

    Args:
        measure: returns free and total bytes.
        count_flushes: returns how often the allocator has freed its cache.

    Attributes:
        is_enough: the next change of phases frees nothing.
    """

    def __init__(
        self,
        measure: Callable[[], tuple[int, int] | None] = device_memory,
        count_flushes: Callable[[], int] = allocator_flushes,
    ) -> None:
        self._measure, self._count_flushes = measure, count_flushes
        self.is_enough = False
        self._unused: int | None = None  # bytes that the training phase has left
        self._before_engine = 0
        self._was_disturbed = False  # something else than an update has had the device
        self._num_flushes = 0

    def measure_training(self, may_stay: bool, growth_bytes: int = 0) -> None:
        """Measures what the training phase has left free. Call it before anything is freed.

        Args:
            may_stay: nobody asked for training's memory to be freed, and since it was last freed a
                full update has run.
            growth_bytes: that full micro-batches would take beyond those of this update.
        """
        found, flushes = self._measure(), self._count_flushes()
        is_known = not self._was_disturbed and flushes == self._num_flushes
        self._was_disturbed, self._num_flushes = False, flushes
        self._unused = None
        if found is not None and may_stay and is_known:
            self._unused = found[0] - growth_bytes

    def measure_freed(self) -> None:
        """Measures what is free once training's memory is, before the engine takes its own."""
        found = self._measure()
        self._before_engine = found[0] if found is not None else 0

    def reset(self) -> None:
        """Makes both phases free their memory again, until another update has been measured."""
        self.is_enough, self._was_disturbed = False, True

    def spare_bytes(self) -> int:
        """Returns the bytes left beyond the required share of this rank's device if both stay.

        Call it while the engine holds all of its memory. Negative: too few, or not known.
        """
        found = self._measure()
        if found is None or self._unused is None:
            return -1
        free, size = found
        if self.is_enough:  # the engine was there all the time
            return self._unused - int(LEAST_SHARE * size)
        return self._unused - (self._before_engine - free) - int(SPARE_SHARE * size)

    def decide(self, spare_bytes: Sequence[int]) -> None:
        """Sets `is_enough` from the `spare_bytes` of all ranks."""
        self.is_enough = min(spare_bytes) >= 0
