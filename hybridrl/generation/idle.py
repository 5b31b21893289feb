"""How long ranks that train and ranks that generate wait for each other. Pure, no torch."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from hybridrl.parallel.layout import RolloutLayout


class Clock(NamedTuple):
    """Of one rank, since it told this last.

    Args:
        busy_s: that its engine worked.
        waited_s: that it waited for samples.
        all_s: that passed; 0: it tells this for the first time.
    """

    busy_s: float
    waited_s: float = 0.0
    all_s: float = 0.0


class WaitClock:
    """Takes the time between two handovers of samples.

    Attributes:
        waited_s: that this rank waited for samples, since the last one.
    """

    def __init__(self) -> None:
        self.waited_s, self._since = 0.0, 0.0

    def take(self, busy_s: float) -> Clock:
        """Returns what passed since the last call.

        Args:
            busy_s: that this rank's engine worked.
        """
        now, since = time.perf_counter(), self._since
        found = Clock(busy_s, self.waited_s, now - since if since else 0.0)
        self.waited_s, self._since = 0.0, now
        return found


def added(clocks: Sequence[Clock], others: Sequence[Clock]) -> Sequence[Clock]:
    """Returns the time of two parts of a step, by rank; the second's alone where there is no first
    one, or where it is not known how long that took.
    """
    if not clocks or not all(one.all_s for one in clocks):
        return others
    pairs = zip(clocks, others, strict=True)
    return [Clock(*(a + b for a, b in zip(one, other, strict=True))) for one, other in pairs]


def idle_shares(clocks: Sequence[Clock], engines: Collection[int]) -> dict[str, float]:
    """Returns which share of the time ranks wait, each a mean over the ranks of a side:
    `idle/training` those that train, for samples; `idle/rollout` those with an engine, for new
    weights or for each other. Nothing where no time is known.

    Args:
        clocks: of all ranks.
        engines: ranks with an engine; the others train.
    """
    if not all(one.all_s for one in clocks):
        return {}
    waits = [1 - clocks[rank].busy_s / clocks[rank].all_s for rank in engines]
    others = [one for rank, one in enumerate(clocks) if rank not in engines]
    return {
        "idle/training": sum(one.waited_s / one.all_s for one in others) / len(others),
        "idle/rollout": sum(waits) / len(waits),
    }


def busy_of_replicas(clocks: Sequence[Clock], layout: RolloutLayout) -> tuple[float, float]:
    """Returns how long engines worked: the mean over replicas, and the longest.

    Args:
        clocks: of all ranks.
        layout: of the replicas, whose ranks work together.
    """
    busy = [one.busy_s for rank, one in enumerate(clocks) if layout.tp_rank(rank) == 0]
    return sum(busy) / len(busy), max(busy)
