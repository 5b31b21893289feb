"""The optimizer steps of a step: over which samples, and what is done with one that goes wrong.

Who waits for whom: all ranks call alike.
"""

from __future__ import annotations

from hybridrl.algorithms.base import Algorithm
from hybridrl.checkpoint.random_states import rng_state
from hybridrl.contracts.batch import TrainBatch
from hybridrl.loop.skipped import SkippedSteps
from hybridrl.metrics.values import SKIPPED, average
from hybridrl.roles.mix import Mix
from hybridrl.roles.roles import Roles
from hybridrl.training.batches.packing import even_sizes
from hybridrl.training.mismatch import behaviour_metrics
from hybridrl.training.update import optimizer_step


def take_updates(
    batch: TrainBatch,
    step: int,
    number: int,
    algorithm: Algorithm,
    roles: Roles,
    mix: Mix,
    skipped: SkippedSteps,
) -> dict[str, float]:
    """Takes optimizer steps over equal parts of the batch, but for those that cannot be trusted,
    each with its part of further terms; returns mean metrics. Collective.

    Args:
        batch: the samples of the step.
        step: number of finished steps.
        number: of optimizer steps.
        algorithm, roles, mix, skipped: of the run.

    Raises:
        UserError: too many in a row could not be trusted.
    """
    sizes = even_sizes(batch.num_samples, number)  # of those left
    mixed = mix.batches(roles, len(sizes), roles.trains_policy(step))
    found, end = [], 0
    for index, (size, terms) in enumerate(zip(sizes, mixed, strict=True)):
        part, end = batch.select(range(end, end + size)), end + size
        random_states = rng_state()  # a pass draws from them
        gradients = roles.gradients(part, step, terms)
        found.append(optimizer_step(gradients))
        if found[-1][SKIPPED]:
            skipped.add(step + 1, index, part, terms, gradients, random_states)
        else:
            skipped.in_a_row = 0
    metrics = average(found)
    if algorithm.needs.rollouts and batch.old_logp_T is not None:
        # Correlations have no mean.
        metrics |= behaviour_metrics(batch, batch.old_logp_T, algorithm)
    return metrics
