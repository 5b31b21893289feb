"""Whether the device has room for training and rollout at once, so that neither must be freed.

To unmap an engine, to give blocks back to the driver and to map and allocate all again takes some
tenths of a second a step. Where the most that a whole step of training held leaves enough for the
engine, both stay where they are. It is measured, not predicted: torch's allocator keeps what it
ever held until it is told to give it back, so after an update the driver's free memory is what
training never used. An update whose micro-batches were not full tells less: what full ones would
take beyond is set aside, since an engine that stays cannot make way for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

# Of the device's memory. Free beside training and engine before both stay: batches differ, and so
# does what their passes need. Less than the second is no room any more.
SPARE_SHARE, LEAST_SHARE = 0.10, 0.05


def device_memory() -> tuple[int, int] | None:
    """Returns free and all bytes of this rank's device; None on CPU, which gives nothing back."""
    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None


def allocator_flushes() -> int:
    """Returns how often torch's allocator gave all back and tried again, for want of memory."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


class Room:
    """Decides, from transition to transition, whether both phases' memory stays.

    The numbers of all ranks decide together: each tells its own `spare_bytes`.

    Args:
        measure: returns free and all bytes.
        count_flushes: says how often the allocator has given back what it held.

    Attributes:
        is_enough: nothing is freed at the next change of phases.
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
        self._is_blurred = False  # something else than an update has had the device
        self._num_flushes = 0

    def note_training(self, may_stay: bool, growth_bytes: int = 0) -> None:
        """Takes in what the training phase has left free; before anything is given back.

        Args:
            may_stay: whether nobody wants it freed, and an update has taken all that it takes since
                blocks were given back.
            growth_bytes: that full micro-batches would take beyond those of this update.
        """
        found, flushes = self._measure(), self._count_flushes()
        is_sharp = not self._is_blurred and flushes == self._num_flushes
        self._is_blurred, self._num_flushes = False, flushes
        self._unused = None
        if found is not None and may_stay and is_sharp:
            self._unused = found[0] - growth_bytes

    def forget(self) -> None:
        """Both phases take turns again, until another update has been measured."""
        self.is_enough, self._is_blurred = False, True

    def note_freed(self) -> None:
        """Takes in what is free before the engine takes its memory."""
        found = self._measure()
        self._before_engine = found[0] if found is not None else 0

    def spare_bytes(self) -> int:
        """Returns what is left of this rank's device if all stays, beyond what must be; less than
        nothing: too little, or not known. With the engine complete.
        """
        found = self._measure()
        if found is None or self._unused is None:
            return -1
        free, size = found
        if self.is_enough:  # the engine was there all the time
            return self._unused - int(LEAST_SHARE * size)
        return self._unused - (self._before_engine - free) - int(SPARE_SHARE * size)

    def decide(self, spare_bytes: Sequence[int]) -> None:
        """Takes in the numbers of all ranks."""
        self.is_enough = min(spare_bytes) >= 0
