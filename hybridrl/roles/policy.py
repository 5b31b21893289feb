"""The policy: log-probabilities of a batch's tokens, and updates with an algorithm's loss.

Collective: all ranks pass the same samples, although each holds the tokens of only some
(contracts/holders.py), for which it receives columns. All ranks receive the same metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from hybridrl.algorithms.base import Algorithm, LossOutput
from hybridrl.algorithms.policy_gradient import PolicyGradient
from hybridrl.algorithms.preference import feedback_metrics
from hybridrl.contracts.batch import TrainBatch
from hybridrl.contracts.likely_tokens import LIKELY_LOGPS
from hybridrl.contracts.micro_batch import MicroBatch
from hybridrl.models.megatron.heads import TokenStats
from hybridrl.training.mismatch import behaviour_metrics
from hybridrl.training.model import Loss, ParallelModel
from hybridrl.training.update import Gradients, LossPart, detached, optimizer_step

TERM_TEMPERATURE = 1.0
"""Temperature for log-probabilities in loss terms, whose responses were not sampled."""


@dataclass(frozen=True)
class LossTerm:
    """An additional term of the policy's loss, with all its samples and their columns."""

    name: str
    algorithm: Algorithm
    weight: float
    batch: TrainBatch


class Policy:
    """A language model in training, or the frozen reference.

    Args:
        temperature: Divisor of the logits, equal to the sampling temperature.
        uses_adapters: Whether to compute with the model's LoRA adapters. Without them, a policy in
            training serves as its frozen reference.

    Attributes:
        old_is_sampled: Whether old log-probabilities are the engine's own. Mismatch metrics then
            compare the engine with the update's forward pass.
    """

    def __init__(
        self,
        model: ParallelModel,
        algorithm: Algorithm,
        num_updates_in_run: int,
        temperature: float = 1.0,
        uses_adapters: bool = True,
    ) -> None:
        self._uses_adapters = uses_adapters
        self.model, self.algorithm = model, algorithm
        self.num_updates_in_run, self.temperature = num_updates_in_run, temperature
        self._start_logp_T: torch.Tensor | None = None
        self.old_is_sampled = False

    def logprobs(self, batch: TrainBatch, temperature: float | None = None) -> torch.Tensor:
        """Returns each response token's log-probability in nats: (T,) fp32, zero on prompts."""
        self._check_blobs(batch)
        plan = self.model.plan(batch, self.temperature if temperature is None else temperature)
        with nullcontext() if self._uses_adapters else self.model.without_adapters():
            outputs: list[TokenStats] = self.model.forward_all(plan.inputs)
        logp_T = plan.column([output.logp_S for output in outputs])
        return logp_T * batch.response_mask_T

    def take_start_logps(self) -> torch.Tensor | None:
        """Returns the log-probabilities of the last `gradients` call, once: (T,) fp32, or None."""
        found, self._start_logp_T = self._start_logp_T, None
        return found

    def _check_blobs(self, batch: TrainBatch) -> None:
        """Raises BatchError if a batch lacks blobs that the model reads; terms may lack them."""
        for extra in self.model.planner.extra_inputs:
            for name in extra.blobs if extra.needs_blobs else ():
                batch.require_blob(name, extra.needed_by)

    def update(self, batch: TrainBatch, terms: Sequence[LossTerm] = ()) -> dict[str, float]:
        """Takes one optimizer step on a mini-batch; skips it if the loss or gradient is not finite.

        Returns:
            Metrics over all ranks: `policy/loss`, `policy/grad_norm`, `policy/learning_rate`,
            `train/skipped_steps`, `mismatch/*` (for sampled responses), metrics of the algorithm,
            and metrics of the loss terms, such as `NAME/loss`.
        """
        return optimizer_step([self.gradients(batch, terms=terms)])

    def gradients(
        self,
        batch: TrainBatch,
        denominator: float | None = None,
        terms: Sequence[LossTerm] = (),
    ) -> Gradients:
        """Accumulates the gradients of a mini-batch and of weighted loss terms, in the same passes.

        `denominator` is that of the loss, by default the algorithm's for this batch.
        """
        if denominator is None:
            denominator = self.algorithm.denominator(batch)
        self._check_blobs(batch)
        logps: list[torch.Tensor] = []
        plan = self.model.plan(batch, self.temperature)
        plans = [self.model.plan(term.batch, TERM_TEMPERATURE) for term in terms]
        more = [(p.inputs, _loss_of_term(term)) for p, term in zip(plans, terms, strict=True)]
        main = _loss(self.algorithm, denominator, logps)
        results: list[LossOutput] = self.model.accumulate(plan.inputs, main, *more)
        done = len(plan.inputs)
        loss_parts = [LossPart.of("policy", self.model, batch, plan.inputs, results[:done])]
        for term, term_plan in zip(terms, plans, strict=True):
            inputs, begin, done = term_plan.inputs, done, done + len(term_plan.inputs)
            own = results[begin:done]
            loss_parts.append(LossPart.of(term.name, self.model, term.batch, inputs, own))
        found = Gradients.of("policy", self.model, loss_parts, self.num_updates_in_run)
        if self.algorithm.needs.rollouts:
            # If the batch lacks the column, this was the first forward pass of the step.
            old_T = batch.old_logp_T
            if old_T is None:
                old_T = self._start_logp_T = plan.column(logps)
            elif self.old_is_sampled:
                old_T = plan.column(logps)
            found.metrics.update(behaviour_metrics(batch, old_T, self.algorithm))
        for term, part in zip(terms, loss_parts[1:], strict=True):
            found.metrics.update(_term_metrics(term, part))
        return found

    def step_mismatch(self, batch: TrainBatch, first: Mapping[str, float]) -> dict[str, float]:
        """Returns the metrics that compare engine and trainer over a whole step, whose first
        optimizer step had the metrics `first`.
        """
        if self.old_is_sampled:
            # Later parts are computed with updated weights, and old log-probabilities are the
            # engine's own, so only the first part compares engine and trainer.
            compared = ("mismatch/", "correction/")
            return {name: x for name, x in first.items() if name.startswith(compared)}
        if self.algorithm.needs.rollouts and batch.old_logp_T is not None:
            # Computed over the whole batch, because correlations cannot be averaged.
            return behaviour_metrics(batch, batch.old_logp_T, self.algorithm)
        return {}


def _loss(
    algorithm: Algorithm,
    denominator: float,
    logps: list[torch.Tensor] | None = None,
    weight: float = 1.0,
) -> Loss:
    def loss(output: TokenStats, micro: MicroBatch) -> tuple[torch.Tensor, LossOutput]:
        chosen = output.chosen_logp_SK
        logp = chosen if chosen is not None and algorithm.needs.teacher_top else output.logp_S
        result = algorithm.loss(logp, output.entropy_S, micro, denominator)
        if (engine_logp := micro.model_inputs.get(LIKELY_LOGPS)) is not None:
            assert isinstance(algorithm, PolicyGradient)  # only these have the knob
            parts = [output.logp_S[:, None], *([] if chosen is None else [chosen])]
            logp_SK = torch.cat(parts, 1)
            centering = algorithm.centering_loss(logp_SK, engine_logp.value, micro, denominator)
            result = replace(result, loss=result.loss + centering)
        if logps is not None:
            logps.append(output.logp_S.detach())
        return result.loss if weight == 1 else weight * result.loss, detached(result)

    return loss


def _loss_of_term(term: LossTerm) -> Loss:
    return _loss(term.algorithm, term.algorithm.denominator(term.batch), weight=term.weight)


def _term_metrics(term: LossTerm, part: LossPart) -> dict[str, float]:
    found = {**part.metrics}
    if term.algorithm.needs.feedback is not None:
        found |= {  # the loss itself, because `loss` returns its first-order change
            name.replace("policy/", f"{term.name}/"): value
            for name, value in feedback_metrics(term.batch).items()
        }
    prefix = f"{term.name}/"
    return {
        name if name.startswith(prefix) else prefix + name.removeprefix("policy/"): value
        for name, value in found.items()
    }
