"""Collects the metrics of a step, and writes samples to `rollouts/`."""

from __future__ import annotations

from hybridrl.algorithms.base import Algorithm
from hybridrl.algorithms.preference import feedback_metrics
from hybridrl.generation.sampler import Sampler
from hybridrl.loop.journal import Journal
from hybridrl.loop.observers import Observer, StepRecord
from hybridrl.loop.run_data import RunData
from hybridrl.roles.roles import Roles


class StepMetrics(Observer):
    """Completes the metrics of a step; collective."""

    def __init__(
        self,
        *,
        algorithm: Algorithm,
        roles: Roles,
        data: RunData,
        sampler: Sampler,
        journal: Journal,
    ) -> None:
        self._algorithm, self._roles, self._data = algorithm, roles, data
        self._sampler, self._journal = sampler, journal

    def step_begins(self, number: int) -> None:
        self._journal.timer.start_step(number)

    def step_ends(self, record: StepRecord) -> None:
        needs, metrics, batch = self._algorithm.needs, record.metrics, record.batch
        metrics["train/epoch"] = self._data.prompts.epoch
        if needs.rollouts:
            learned = self._roles.learned(batch)
            self._journal.dump_samples(record.number, record.scored, learned, self._data.scorer)
            metrics |= self._journal.describe(record.scored) | self._sampler.metrics()
        metrics |= feedback_metrics(batch) if needs.feedback else {}
        metrics |= self._roles.sharing(batch)
        generated, terms = self._sampler.generated, self._data.mix.taken
        flops = self._roles.flops(batch, record.number - 1, generated, terms)
        shown = record.scored if needs.rollouts else batch
        summary = self._journal.summarize(shown, metrics, flops)
        metrics.clear()
        metrics |= summary
