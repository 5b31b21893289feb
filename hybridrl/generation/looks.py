"""When engines of several replicas stop together, decided in steps of the engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

BegunSum = Callable[[], torch.Tensor]
"""Waits for a sum over ranks, and returns it."""

# Steps of the engines between two looks.
STEPS_BETWEEN_ENDS = 8


class Looks:
    """Looks every STEPS_BETWEEN_ENDS steps of this rank's engine whether all may stop.

    At each look ranks begin to add up their counts, and read the sum at the next one, when it has
    long been there. A rank waits for another one only if that is a whole look behind: engines that
    are as fast in the mean, and not at each step, wait for each other no more than without looks.
    What engines do meanwhile is not lost, since what is unfinished goes on later. The first look,
    before the first step, is read at once: there may be nothing to do.

    Ranks stop at the same number of steps, which follows from the counts and not from the time.

    Args:
        begin: begins a sum over the ranks that look; collective over them.
        ends: whether ranks may stop, by a sum of counts.
    """

    def __init__(
        self, begin: Callable[[torch.Tensor], BegunSum], ends: Callable[[list[int]], bool]
    ) -> None:
        self._begin, self._ends = begin, ends
        self._begun: BegunSum | None = None

    def may_end(self, num_steps: int, counts: Callable[[], Sequence[int]]) -> bool:
        """Returns whether all ranks stop now; at a look collective over the ranks that look.

        Args:
            num_steps: that this rank's engine has taken, or would have, if it had something to do.
            counts: of this rank, as of now.
        """
        if num_steps % STEPS_BETWEEN_ENDS:
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
