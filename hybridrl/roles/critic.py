"""The critic: a value for the state before each response token, and its regression. A reward model
that is trained is one too: its values are scores, read at each response token. Collective like the
policy.
"""

from __future__ import annotations

import torch

from hybridrl.algorithms.base import CriticAlgorithm, LossOutput
from hybridrl.contracts.batch import TrainBatch
from hybridrl.contracts.micro_batch import MicroBatch
from hybridrl.training.model import ParallelModel
from hybridrl.training.update import Gradients, LossPart, detached, optimizer_step


class Critic:
    """A value model that is trained beside the policy.

    Args:
        model: the parallel model with a value head, weights in place.
        algorithm: gives the value loss and its global denominator.
        num_updates_in_run: optimizer steps of this model in the whole run.
    """

    def __init__(
        self, model: ParallelModel, algorithm: CriticAlgorithm, num_updates_in_run: int
    ) -> None:
        self.model, self.algorithm = model, algorithm
        self.num_updates_in_run = num_updates_in_run

    def values(self, batch: TrainBatch) -> torch.Tensor:
        """Returns the value of the state that each response token was sampled from, or of a reward
        model the score at each response token: (T,) fp32, zero on prompts.
        """
        plan = self.model.plan(batch)
        values_T = plan.column(self.model.forward_all(plan.inputs))
        return values_T * batch.response_mask_T

    def gradients(self, batch: TrainBatch, denominator: float | None = None) -> Gradients:
        """Accumulates the gradients towards `returns_T`, with `critic/*` metrics of all ranks;
        arguments as of `Policy.gradients`.
        """
        if denominator is None:
            denominator = self.algorithm.denominator(batch)

        def loss(values_S: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, LossOutput]:
            result = self.algorithm.value_loss(values_S, micro, denominator)
            return result.loss, detached(result)

        inputs = self.model.plan(batch).inputs
        results: list[LossOutput] = self.model.accumulate(inputs, loss)
        share = LossPart.of("critic", self.model, batch, inputs, results)
        return Gradients.of("critic", self.model, [share], self.num_updates_in_run)

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Takes one optimizer step, or none if loss or gradient is not finite; returns metrics."""
        return optimizer_step([self.gradients(batch)])
