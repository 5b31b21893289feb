"""The policy: per-token log-probabilities of a batch, and the update that an algorithm's loss asks
for.

Collective: every rank calls with the same samples, wherever their tokens are, and gets the same
metrics, and columns of the tokens that it has (contracts/holders.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hybridrl.algorithms.base import Algorithm, LossOutput
from hybridrl.algorithms.preference import feedback_metrics
from hybridrl.contracts.batch import TrainBatch
from hybridrl.contracts.micro_batch import MicroBatch
from hybridrl.models.megatron.heads import TokenStats
from hybridrl.training.mismatch import behaviour_metrics
from hybridrl.training.model import Loss, ParallelModel
from hybridrl.training.update import Gradients, LossPart, detached, optimizer_step

TERM_TEMPERATURE = 1.0
"""The temperature of what is not sampled: a term's likelihood is the model's own."""


@dataclass(frozen=True)
class LossTerm:
    """A further term of the policy's loss, on responses of its own.

    Args:
        name: first part of its metrics' names.
        algorithm: gives its loss and the global denominator.
        weight: of that loss.
        batch: all its samples, with the columns that the algorithm reads, log-probabilities at the
            temperature TERM_TEMPERATURE.
    """

    name: str
    algorithm: Algorithm
    weight: float
    batch: TrainBatch


class Policy:
    """A language model that is trained, or frozen as a reference.

    Args:
        model: the parallel language model, weights in place.
        algorithm: gives the loss and its global denominator.
        num_updates_in_run: optimizer steps of this model in the whole run.
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
        self.num_updates_in_run, self.temperature = num_updates_in_run, temperature
        self._start_logp_T: torch.Tensor | None = None

    def logprobs(self, batch: TrainBatch, temperature: float | None = None) -> torch.Tensor:
        """Returns the log-probability of each response token, nats, (T,) fp32, zero on prompt
        tokens; at the policy's own temperature, or at this one.
        """
        self._check_blobs(batch)
        plan = self.model.plan(batch, self.temperature if temperature is None else temperature)
        outputs: list[TokenStats] = self.model.forward_all(plan.inputs)
        logp_T = plan.column([output.logp_S for output in outputs])
        return logp_T * batch.response_mask_T

    def take_start_logps(self) -> torch.Tensor | None:
        """Returns the log-probabilities, nats, (T,) fp32, at the start of the step of the tokens
        that `gradients` saw last, where the batch did not bring them; once, then None.
        """
        found, self._start_logp_T = self._start_logp_T, None
        return found

    def _check_blobs(self, batch: TrainBatch) -> None:
        """Raises BatchError if the blobs that the model reads are not there; terms need none."""
        for extra in self.model.planner.extra_inputs:
            for name in extra.blobs:
                batch.require_blob(name, extra.needed_by)

    def update(self, batch: TrainBatch, terms: Sequence[LossTerm] = ()) -> dict[str, float]:
        """Takes one optimizer step on a mini-batch, or none if its loss or gradient is not finite.

        Args:
            batch: all samples of the mini-batch, with the columns that the algorithm reads.
            terms: what is added to the loss.

        Returns:
            `policy/loss`, `policy/grad_norm`, `policy/learning_rate`, `train/skipped_steps`,
            `mismatch/*` (of sampled responses) and the algorithm's own metrics, over all ranks;
            those of terms, `NAME/loss` among them.
        """
        return optimizer_step([self.gradients(batch, terms=terms)])

    def gradients(
        self,
        batch: TrainBatch,
        denominator: float | None = None,
        terms: Sequence[LossTerm] = (),
    ) -> Gradients:
        """Accumulates the gradients of a mini-batch, and of weighted terms in the same passes.

        Args:
            batch, terms: as of `update`.
            denominator: of the mini-batch's loss; None: as the algorithm has it for this batch.
        """
        if denominator is None:
            denominator = self.algorithm.denominator(batch)
        self._check_blobs(batch)
        logps: list[torch.Tensor] = []
        plan = self.model.plan(batch, self.temperature)
        plans = [self.model.plan(term.batch, TERM_TEMPERATURE) for term in terms]
        more = [(of.inputs, _loss_of_term(term)) for of, term in zip(plans, terms, strict=True)]
        main = _loss(self.algorithm, denominator, logps)
        results: list[LossOutput] = self.model.accumulate(plan.inputs, main, *more)
        done = len(plan.inputs)
        loss_parts = [LossPart.of("policy", self.model, batch, plan.inputs, results[:done])]
        for term, of in zip(terms, plans, strict=True):
            found_here, done = results[done : done + len(of.inputs)], done + len(of.inputs)
            loss_parts.append(LossPart.of(term.name, self.model, term.batch, of.inputs, found_here))
        found = Gradients.of("policy", self.model, loss_parts, self.num_updates_in_run)
        if self.algorithm.needs.rollouts:
            # Without the column this forward's log-probabilities are those of the step's start.
            old_T = batch.old_logp_T
            if old_T is None:
                old_T = self._start_logp_T = plan.column(logps)
            found.metrics.update(behaviour_metrics(batch, old_T, self.algorithm))
        for term, part in zip(terms, loss_parts[1:], strict=True):
            found.metrics.update(_term_metrics(term, part))
        return found


def _loss(
    algorithm: Algorithm,
    denominator: float,
    logps: list[torch.Tensor] | None = None,
    weight: float = 1.0,
) -> Loss:
    """Returns the loss of a micro-batch; it keeps the log-probabilities in `logps`."""

    def loss(output: TokenStats, micro: MicroBatch) -> tuple[torch.Tensor, LossOutput]:
        chosen = output.chosen_logp_SK
        logp = output.logp_S if chosen is None else chosen
        result = algorithm.loss(logp, output.entropy_S, micro, denominator)
        if logps is not None:
            logps.append(output.logp_S.detach())
        return result.loss if weight == 1 else weight * result.loss, detached(result)

    return loss


def _loss_of_term(term: LossTerm) -> Loss:
    return _loss(term.algorithm, term.algorithm.denominator(term.batch), weight=term.weight)


def _term_metrics(term: LossTerm, part: LossPart) -> dict[str, float]:
    """Returns a term's metrics under its own name: `policy/kl` becomes `NAME/kl`."""
    found = {**part.metrics}
    if term.algorithm.needs.feedback is not None:
        found |= {  # the loss itself, where `loss` is its change
            name.replace("policy/", f"{term.name}/"): value
            for name, value in feedback_metrics(term.batch).items()
        }
    prefix = f"{term.name}/"
    return {
        name if name.startswith(prefix) else prefix + name.removeprefix("policy/"): value
        for name, value in found.items()
    }
