"""Takes a training step's optimizer steps. Collective: all ranks call every function together."""

from __future__ import annotations

from hybridrl.algorithms.base import Algorithm
from hybridrl.checkpoint.random_states import rng_state
from hybridrl.contracts.batch import TrainBatch
from hybridrl.loop.skipped import SkippedSteps
from hybridrl.metrics.values import SKIPPED, average
from hybridrl.roles.mix import Mix
from hybridrl.roles.roles import Roles
from hybridrl.training.batches.batch_plan import mini_batch_sizes
from hybridrl.training.mismatch import behaviour_metrics
from hybridrl.training.update import optimizer_step


class Updates:
    def __init__(
        self, *, algorithm: Algorithm, roles: Roles, mix: Mix, skipped: SkippedSteps
    ) -> None:
        self._algorithm, self._roles, self._mix, self._skipped = algorithm, roles, mix, skipped

    def take(self, batch: TrainBatch, step: int, number: int) -> dict[str, float]:
        """Takes one optimizer step for each equal part of the batch and of loss terms; collective.
        A step is skipped if its loss or gradient is not finite. Returns mean metrics. Raises
        UserError if `train.max_skipped_steps` optimizer steps in a row were skipped.
        """
        roles = self._roles
        sizes = mini_batch_sizes(batch, number)
        mixed = self._mix.batches(roles, len(sizes), roles.trains_policy(step))
        found, end = [], 0
        for index, (size, terms) in enumerate(zip(sizes, mixed, strict=True)):
            part, end = batch.select(range(end, end + size)), end + size
            random_states = rng_state()  # copied before the forward pass changes them
            gradients = roles.gradients(part, step, terms)
            found.append(optimizer_step(gradients))
            if found[-1][SKIPPED]:
                self._skipped.add(step + 1, index, part, terms, gradients, random_states)
            else:
                self._skipped.in_a_row = 0
        metrics = average(found)
        if roles.policy.old_is_sampled:
            # Later parts are computed with updated weights, and old log-probabilities are the
            # engine's own, so only the first part compares engine and trainer.
            compared = ("mismatch/", "correction/")
            metrics |= {name: x for name, x in found[0].items() if name.startswith(compared)}
        elif self._algorithm.needs.rollouts and batch.old_logp_T is not None:
            # Computed over the whole batch, because correlations cannot be averaged.
            metrics |= behaviour_metrics(batch, batch.old_logp_T, self._algorithm)
        return metrics
