"""Metrics of generation: ages of samples, and waiting times of ranks. No torch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from hybridrl.generation.schedule import Group
from hybridrl.parallel.layout import RolloutLayout


class Clock(NamedTuple):
    """Seconds since the last report: of work, of waiting, and in all (0 in the first report)."""

    busy_s: float
    waited_s: float = 0.0
    all_s: float = 0.0


class EngineTimes:
    """Measures how long this rank's engine works (`busy_s`) and the rank waits (`waited_s`)."""

    def __init__(self, layout: RolloutLayout, generates_ahead: bool) -> None:
        self._layout, self._generates_ahead = layout, generates_ahead
        self.busy_s = self.waited_s = 0.0
        self._ahead_s = self._since = 0.0
        self._of_calls: list[tuple[float, float]] = []  # mean and maximum of replicas
        self._clocks: Sequence[Clock] = ()  # from earlier rounds
        self._idle: dict[str, float] = {}

    def begin(self, is_evaluation: bool) -> None:
        """Begins a step or an evaluation."""
        self._of_calls = []
        if not is_evaluation:
            self._clocks = ()

    def end_ahead(self) -> None:
        """Counts work so far towards the next step, even if an evaluation comes first."""
        self._ahead_s, self.busy_s = self.busy_s, 0.0

    def take(self, carries_over: bool) -> Clock:
        """Returns the times since the last exchange of samples."""
        if not carries_over:
            return Clock(self.busy_s)
        busy_s, self._ahead_s = self.busy_s + self._ahead_s, 0.0
        now, since = time.perf_counter(), self._since
        found = Clock(busy_s, self.waited_s, now - since if since else 0.0)
        self.waited_s, self._since = 0.0, now
        return found

    def note(self, clocks: Sequence[Clock], is_evaluation: bool) -> None:
        """Stores the times that all ranks took for a `generate` call."""
        self.busy_s = 0.0
        tp_rank = self._layout.tp_rank
        busy = [clock.busy_s for rank, clock in enumerate(clocks) if tp_rank(rank) == 0]
        self._of_calls.append((sum(busy) / len(busy), max(busy)))
        if self._generates_ahead and not is_evaluation:
            self._clocks = add_clocks(self._clocks, clocks)
            self._idle = idle_shares(self._clocks, self._layout.ranks)

    def metrics(self) -> dict[str, float]:
        """Returns `generate/idle_share`, the mean share of the generation time for which replicas
        waited for the slowest, and `idle/*` if engines generate ahead.
        """
        worked = sum(mean for mean, _ in self._of_calls)
        took = sum(longest for _, longest in self._of_calls)
        return {"generate/idle_share": 1 - worked / took if took > 0 else 0.0, **self._idle}


def add_clocks(clocks: Sequence[Clock], others: Sequence[Clock]) -> Sequence[Clock]:
    """Returns each rank's sum over two parts of a step; the second if the first is unknown."""
    if not clocks or not all(clock.all_s for clock in clocks):
        return others
    return [Clock(*map(sum, zip(*pair, strict=True))) for pair in zip(clocks, others, strict=True)]


def idle_shares(clocks: Sequence[Clock], engines: Collection[int]) -> dict[str, float]:
    """Returns the mean share of time for which ranks wait; {} if a time is unknown:
    `idle/training`, training ranks for samples, and `idle/rollout`, ranks with an engine for new
    weights or other engines.
    """
    if not all(clock.all_s for clock in clocks):
        return {}
    waits = [1 - clocks[rank].busy_s / clocks[rank].all_s for rank in engines]
    others = [clock for rank, clock in enumerate(clocks) if rank not in engines]
    return {
        "idle/training": sum(clock.waited_s / clock.all_s for clock in others) / len(others),
        "idle/rollout": sum(waits) / len(waits),
    }


def lag_metrics(taken: Sequence[Group], num_dropped: int, step: int) -> dict[str, float]:
    """Returns metrics of token ages: steps between the weights that sampled a token and those that
    train on it. `lag/mean` and `lag/max` are over all tokens; `lag/token_share/N` is the share of
    tokens with age N; `lag/mixed_share` is the share of samples with several versions;
    `lag/dropped` counts discarded samples.
    """
    runs = [run for group in taken for sample in group.runs for run in sample]
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
    """Returns the numbers of samples in generation, and of finished ones that no step took."""
    is_done = [done for group in groups for done in group.is_done]
    return {
        "lag/unfinished": float(is_done.count(False)),
        "lag/waiting": float(is_done.count(True)),
    }
