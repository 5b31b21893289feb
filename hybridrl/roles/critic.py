"""The critic: predicts the value of the state before each response token. Collective.

A reward model that is being trained is also a critic; its values are scores at response tokens.
"""

from __future__ import annotations

import torch

from hybridrl.algorithms.base import CriticAlgorithm, LossOutput
from hybridrl.contracts.batch import TrainBatch
from hybridrl.contracts.micro_batch import MicroBatch
from hybridrl.training.model import ParallelModel
from hybridrl.training.update import Gradients, LossPart, detached


class Critic:
    def __init__(
        self, model: ParallelModel, algorithm: CriticAlgorithm, num_updates_in_run: int
    ) -> None:
        self.model, self.algorithm = model, algorithm
        self.num_updates_in_run = num_updates_in_run

    def values(self, batch: TrainBatch) -> torch.Tensor:
        """Returns each sampled token's value or score: (T,) fp32, zero at other tokens."""
        plan = self.model.plan(batch)
        values_T = plan.column(self.model.forward_all(plan.inputs))
        return values_T * batch.response_mask_T

    def gradients(self, batch: TrainBatch, denominator: float | None = None) -> Gradients:
        """Accumulates gradients and `critic/*` metrics; arguments as in `Policy.gradients`."""
        if denominator is None:
            denominator = self.algorithm.denominator(batch)

        def loss(values_S: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, LossOutput]:
            result = self.algorithm.value_loss(values_S, micro, denominator)
            return result.loss, detached(result)

        inputs = self.model.plan(batch).inputs
        results: list[LossOutput] = self.model.accumulate(inputs, loss)
        share = LossPart.of("critic", self.model, batch, inputs, results)
        return Gradients.of("critic", self.model, [share], self.num_updates_in_run)
