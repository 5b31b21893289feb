"""The policy: per-token log-probabilities of a batch, and the update that an algorithm's loss asks
for.

Collective: every rank calls with the same batch (all samples of the step) and gets the same answer.
"""

from __future__ import annotations

import torch

from hybridrl.algorithms.base import Algorithm, LossOutput
from hybridrl.batch import TrainBatch
from hybridrl.micro_batch import MicroBatch
from hybridrl.models.heads import LanguageModel, TokenStats
from hybridrl.trainer.mismatch import behaviour_metrics
from hybridrl.trainer.model import ParallelModel
from hybridrl.trainer.update import Gradients, kept, take


class Policy:
    """A language model that is trained, or frozen as a reference.

    Args:
        model: the parallel language model, weights in place.
        algorithm: gives the loss and its global denominator.
        num_updates_in_run: length of the learning-rate course.
        temperature: divides the logits, so that log-probabilities are of the distribution that was
            sampled from.
    """

    def __init__(
        self,
        model: ParallelModel,
        algorithm: Algorithm,
        num_updates_in_run: int,
        temperature: float = 1.0,
    ) -> None:
        self.model, self.algorithm = model, algorithm
        self.num_updates_in_run = num_updates_in_run
        for chunk in model.chunks:
            if isinstance(chunk, LanguageModel):
                chunk.temperature = temperature

    def logprobs(self, batch: TrainBatch) -> torch.Tensor:
        """Returns the log-probability of each response token, nats, (T,) fp32, zero on prompt
        tokens.
        """
        works = self.model.plan_work(batch)
        outputs: list[TokenStats] = self.model.forward_all(works)
        logp_T = self.model.per_token(batch, works, [output.logp_S for output in outputs])
        return logp_T * batch.response_mask_T

    def update(self, batch: TrainBatch) -> dict[str, float]:
        """Takes one optimizer step on a mini-batch, or none if its loss or gradient is not finite.

        Args:
            batch: all samples of the mini-batch, with the columns that the algorithm reads.

        Returns:
            `policy/loss`, `policy/grad_norm`, `policy/learning_rate`, `train/skipped_steps`,
            `mismatch/*` (of sampled responses) and the algorithm's own metrics, over all ranks.
        """
        return take([self.gradients(batch)])

    def gradients(self, batch: TrainBatch, denominator: float | None = None) -> Gradients:
        """Accumulates the gradients of a mini-batch.

        Args:
            batch: as of `update`.
            denominator: of the loss; None: as the algorithm has it for this batch.
        """
        if denominator is None:
            denominator = self.algorithm.denominator(batch)
        logps: list[torch.Tensor] = []

        def loss(output: TokenStats, micro: MicroBatch) -> tuple[torch.Tensor, LossOutput]:
            chosen = output.chosen_logp_SK
            logp = output.logp_S if chosen is None else chosen
            result = self.algorithm.loss(logp, output.entropy_S, micro, denominator)
            logps.append(output.logp_S.detach())
            return result.loss, kept(result)

        works = self.model.plan_work(batch)
        results: list[LossOutput] = self.model.accumulate(works, loss)
        num_updates = self.num_updates_in_run
        found = Gradients.of("policy", self.model, batch, works, results, num_updates)
        if self.algorithm.needs.rollouts:
            # Without the column this forward's log-probabilities are those of the step's start.
            old_T = batch.old_logp_T
            if old_T is None:
                old_T = self.model.per_token(batch, works, logps)
            found.metrics.update(behaviour_metrics(batch, old_T, self.algorithm))
        found.metrics["policy/learning_rate"] = found.rate
        return found
