"""Metrics of generation: how old samples are, and how long ranks wait for each other. No torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from hybridrl.generation.schedule import Group
from hybridrl.parallel.layout import RolloutLayout


class Clock(NamedTuple):
    """Seconds of one rank since its last report.

    Args:
        all_s: Whole time; 0 in the first report.
    """

    busy_s: float
    waited_s: float = 0.0
    all_s: float = 0.0


class WaitClock:
    """Takes the time between two handovers of samples.

    Attributes:
        waited_s: Seconds that this rank waited for samples since the last one.
    """

    def __init__(self) -> None:
        self.waited_s, self._since = 0.0, 0.0

    def take(self, busy_s: float) -> Clock:
        """Returns the times since the last call; `busy_s` is the work of this rank's engine."""
        now, since = time.perf_counter(), self._since
        found = Clock(busy_s, self.waited_s, now - since if since else 0.0)
        self.waited_s, self._since = 0.0, now
        return found


def added(clocks: Sequence[Clock], others: Sequence[Clock]) -> Sequence[Clock]:
    """Returns the times of two parts of a step, by rank; those of the second alone where the first
    is missing or its length is not known.
    """
    if not clocks or not all(one.all_s for one in clocks):
        return others
    pairs = zip(clocks, others, strict=True)
    return [Clock(*(a + b for a, b in zip(one, other, strict=True))) for one, other in pairs]


def idle_shares(clocks: Sequence[Clock], engines: Collection[int]) -> dict[str, float]:
    """Returns the share of the time that ranks wait, as means over a side: `idle/training` for
    samples, `idle/rollout` for new weights or other engines. Nothing where no time is known.

    Args:
        engines: Ranks with an engine; the others train.
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
    """Returns the mean and the longest work of the replicas, whose ranks work together."""
    busy = [one.busy_s for rank, one in enumerate(clocks) if layout.tp_rank(rank) == 0]
    return sum(busy) / len(busy), max(busy)


def lag_metrics(taken: Sequence[Group], num_dropped: int, step: int) -> dict[str, float]:
    """Returns how old the samples of a step are, in steps between the weights that made a token and
    those that learn from it: `lag/mean` and `lag/max` over all their tokens; `lag/token_share/N`,
    the share of those that are N steps old; `lag/mixed_share`, the share of samples that several
    versions made; `lag/dropped`, samples that were thrown away.
    """
    runs = [one for group in taken for sample in group.runs for one in sample]
    tokens = sum(count for _, count in runs)
    by_age: Counter[int] = Counter()
    for version, count in runs:
        by_age[step - version] += count
    mixed = [len(sample) > 1 for group in taken for sample in group.runs]
    return {
        "lag/mean": sum((step - version) * count for version, count in runs) / tokens,
        "lag/max": float(max(step - version for version, _ in runs)),
        "lag/mixed_share": sum(mixed) / len(mixed),
        "lag/dropped": float(num_dropped),
        **{f"lag/token_share/{age}": num / tokens for age, num in sorted(by_age.items())},
    }


def queue_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns `lag/unfinished`, samples that are still generated, and `lag/waiting`, finished
    samples that no step has taken.
    """
    is_done = [one for group in groups for one in group.is_done]
    return {
        "lag/unfinished": float(is_done.count(False)),
        "lag/waiting": float(is_done.count(True)),
    }
