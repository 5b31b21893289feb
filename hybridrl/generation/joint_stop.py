"""Decides after which engine step all replicas stop together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

PendingSum = Callable[[], torch.Tensor]
"""Waits for a sum over ranks and returns it."""

STEPS_BETWEEN_SUMS = 8


class JointStop:
    """Sums counts over ranks every STEPS_BETWEEN_SUMS engine steps, to stop all ranks together.

    A rank reads a sum only when the next sum is due, so it waits only for ranks that are a whole
    interval behind. The sum before the first step is read immediately, because all engines may be
    idle. All ranks stop after the same number of steps, which depends only on the counts. `begin`
    starts a collective sum, `ends` decides from it.
    """

    def __init__(
        self, begin: Callable[[torch.Tensor], PendingSum], ends: Callable[[list[int]], bool]
    ) -> None:
        self._begin, self._ends = begin, ends
        self._pending: PendingSum | None = None

    def is_reached(self, num_steps: int, counts: Callable[[], Sequence[int]]) -> bool:
        """Whether all ranks stop after this many steps, even idle ones; collective at intervals."""
        if num_steps % STEPS_BETWEEN_SUMS:
            return False
        pending, self._pending = self._pending, None
        if pending is not None and self._is_over(pending):
            return True
        pending = self._begin(torch.tensor(counts()))
        if num_steps == 0:
            return self._is_over(pending)
        self._pending = pending
        return False

    def _is_over(self, pending: PendingSum) -> bool:
        return self._ends(pending().tolist())
