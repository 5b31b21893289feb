"""Decides, in steps of the engines, when engines of several replicas stop together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

BegunSum = Callable[[], torch.Tensor]
"""Waits for a sum over ranks, and returns it."""

STEPS_BETWEEN_SUMS = 8


class JointStop:
    """Adds up counts every STEPS_BETWEEN_SUMS engine steps, to see whether all ranks may stop.

    A rank reads a sum at the next one, long after it is there: it waits for another rank only if
    that is a whole interval behind. The sum before the first step is read immediately, since there
    may be nothing to do. Ranks stop at the same number of steps, which follows from the counts and
    not from the time.

    Args:
        begin: Begins a sum over the ranks; collective over them.
        ends: Whether ranks may stop, by a sum of counts.
    """

    def __init__(
        self, begin: Callable[[torch.Tensor], BegunSum], ends: Callable[[list[int]], bool]
    ) -> None:
        self._begin, self._ends = begin, ends
        self._begun: BegunSum | None = None

    def is_reached(self, num_steps: int, counts: Callable[[], Sequence[int]]) -> bool:
        """Returns whether all ranks stop now; collective every STEPS_BETWEEN_SUMS steps.

        Args:
            num_steps: Steps that this rank's engine has taken, idle ones included.
        """
        if num_steps % STEPS_BETWEEN_SUMS:
            return False
        begun, self._begun = self._begun, None
        if begun is not None and self._is_over(begun):
            return True
        begun = self._begin(torch.tensor(counts()))
        if num_steps == 0:
            return self._is_over(begun)
        self._begun = begun
        return False

    def _is_over(self, begun: BegunSum) -> bool:
        return self._ends(begun().tolist())
