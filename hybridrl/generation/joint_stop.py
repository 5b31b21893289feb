"""Decides when the engines of several replicas stop together, in steps of the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

PendingSum = Callable[[], torch.Tensor]
"""Waits for a sum over ranks and returns it."""

STEPS_BETWEEN_SUMS = 8


class JointStop:
    """Sums counts every STEPS_BETWEEN_SUMS engine steps, to find out whether all ranks may stop.

    A rank reads a sum when the next one is due, long after it is complete: it waits for another
    rank only if that is a whole interval behind. The sum before the first step is read immediately,
    because there may be nothing to do. Ranks stop at the same number of steps, which depends on the
    counts and not on time.

    Args:
        begin: Starts a sum over the ranks; collective over them.
        ends: Returns whether ranks may stop, given a sum of counts.
    """

    def __init__(
        self, begin: Callable[[torch.Tensor], PendingSum], ends: Callable[[list[int]], bool]
    ) -> None:
        self._begin, self._ends = begin, ends
        self._pending: PendingSum | None = None

    def is_reached(self, num_steps: int, counts: Callable[[], Sequence[int]]) -> bool:
        """Returns whether all ranks stop now; collective every STEPS_BETWEEN_SUMS steps.

        Args:
            num_steps: Steps that this rank's engine has taken, including idle ones.
            counts: Returns this rank's counts.
        """
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
