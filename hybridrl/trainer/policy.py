"""The policy: per-token log-probabilities of a batch, and the update that an algorithm's loss asks
for.

Collective: every rank calls with the same batch (all samples of the step) and gets the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hybridrl.algorithms.base import Algorithm, LossOutput, num_response_tokens
from hybridrl.batch import TrainBatch
from hybridrl.micro_batch import MicroBatch
from hybridrl.models.heads import LanguageModel, TokenStats
from hybridrl.trainer.mismatch import mismatch_metrics
from hybridrl.trainer.model import ParallelModel
from hybridrl.trainer.optimizer import learning_rate


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
        """Takes one optimizer step on a mini-batch.

        Args:
            batch: all samples of the mini-batch, with the columns that the algorithm reads.

        Returns:
            `policy/loss`, `policy/grad_norm`, `policy/learning_rate`, `mismatch/*` (of sampled
            responses) and the algorithm's own metrics, over all ranks.
        """
        denominator = self.algorithm.denominator(batch)
        logps: list[torch.Tensor] = []

        def loss(output: TokenStats, micro: MicroBatch) -> tuple[torch.Tensor, LossOutput]:
            result = self.algorithm.loss(output.logp_S, output.entropy_S, micro, denominator)
            logps.append(output.logp_S.detach())
            return result.loss, kept(result)

        works = self.model.plan_work(batch)
        results: list[LossOutput] = self.model.accumulate(works, loss)
        metrics = reduce_losses(self.model, "policy/loss", results, num_response_tokens(batch))
        if self.algorithm.needs.rollouts:
            # Without the column this forward's log-probabilities are those of the step's start.
            old_T = batch.old_logp_T
            if old_T is None:
                old_T = self.model.per_token(batch, works, logps)
            metrics |= mismatch_metrics(batch, old_T)
        rate = learning_rate(
            self.model.train,
            self.model.peak_learning_rate,
            self.model.num_updates,
            self.num_updates_in_run,
        )
        metrics["policy/grad_norm"] = self.model.step(rate)
        metrics["policy/learning_rate"] = rate
        return metrics


def kept(result: LossOutput) -> LossOutput:
    """Returns the result with a loss of its own memory: Megatron frees the one that it was given
    as soon as the backward pass has it (`deallocate_pipeline_outputs`).
    """
    return replace(result, loss=result.loss.detach().clone())


def reduce_losses(
    model: ParallelModel,
    loss_name: str,
    results: list[LossOutput],
    num_tokens: float,
) -> dict[str, float]:
    """Combines the losses of all micro-batches on all ranks; the same on every rank afterwards.

    Sums become means over the `num_tokens` response tokens; names that end in `_max` are maxima.
    """
    world = model.world
    local = _local_sums(loss_name, results if world.reports else [])
    names: list[str] = sorted(
        {name for found in world.gather_objects(sorted(local)) for name in found}
    )
    sums = torch.tensor(
        [0.0 if name.endswith("_max") else local.get(name, 0.0) for name in names],
        dtype=torch.float64,
    )
    maxima = torch.tensor(
        [local.get(name, -torch.inf) if name.endswith("_max") else 0.0 for name in names],
        dtype=torch.float64,
    )
    sums, maxima = world.sum_over_world(sums), world.max_over_world(maxima)
    metrics = {}
    for name, total, largest in zip(names, sums.tolist(), maxima.tolist(), strict=True):
        if name.endswith("_max"):
            metrics[name] = largest
        else:
            metrics[name] = total if name == loss_name else total / num_tokens
    return metrics


def _local_sums(loss_name: str, results: list[LossOutput]) -> Mapping[str, float]:
    sums: dict[str, float] = {}
    for result in results:
        for name, value in {loss_name: result.loss, **result.metrics}.items():
            number = float(value)
            if name.endswith("_max"):
                sums[name] = max(sums.get(name, number), number)
            else:
                sums[name] = sums.get(name, 0.0) + number
    return sums
