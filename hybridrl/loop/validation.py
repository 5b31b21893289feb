"""Computes the loss on held-out rows, for algorithms that learn from given responses. Collective.
The forward passes are those of a training step, with the current weights. Results are stored by
step, together with those of evaluations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hybridrl.algorithms.base import Algorithm
from hybridrl.algorithms.preference import feedback_metrics, response_sums
from hybridrl.config.schema import StepsConfig
from hybridrl.contracts.batch import UNRELATED, Prompt, TrainBatch
from hybridrl.data.supervised import supervised_batch
from hybridrl.loop.engine_phases import EnginePhases
from hybridrl.loop.evaluate import Evaluations
from hybridrl.loop.journal import Journal
from hybridrl.loop.observers import Observer, is_due
from hybridrl.metrics.values import VALIDATION
from hybridrl.roles.policy import TERM_TEMPERATURE
from hybridrl.roles.roles import Roles

KEPT = ("loss", "perplexity", "preference/accuracy", "preference/margin")
MAX_PERPLEXITY_NATS = 700.0  # the exponential of larger values overflows a float


class Validation(Observer):
    """Measures the loss on held-out rows, if there are any, whenever this is due."""

    def __init__(
        self,
        *,
        steps: StepsConfig,
        prompts: Sequence[Prompt],
        algorithm: Algorithm,
        roles: Roles,
        phases: EnginePhases,
        journal: Journal,
        evaluations: Evaluations,
    ) -> None:
        self._steps, self._prompts = steps, prompts
        self._algorithm, self._roles = algorithm, roles
        self._phases, self._journal = phases, journal
        self._evaluations, self._first = evaluations, 0

    @property
    def has_rows(self) -> bool:
        return bool(self._prompts)

    def is_left_over(self, step: int, last: int) -> bool:
        """Whether to measure before this start's first step: in a new run, or if a signal prevented
        the measurement after the previous step.
        """
        by_step = self._evaluations.by_step
        has_begun = any(key.startswith(VALIDATION) for found in by_step.values() for key in found)
        return self._is_due(step, last) and (step == 0 or has_begun)

    def _is_due(self, step: int, last: int) -> bool:
        due = step == 0 or is_due(self._steps.eval_every, step, last)
        kept = self._evaluations.by_step.get(str(step), {})
        return due and bool(self._prompts) and not any(key.startswith(VALIDATION) for key in kept)

    def fit_begins(self, first: int, last: int) -> None:
        self._first = first

    def measures(self, number: int, last: int) -> dict[str, float]:
        is_first = number == self._first
        if not (self.is_left_over(number, last) if is_first else self._is_due(number, last)):
            return {}
        found = self.measure()
        kept = self._evaluations.by_step.setdefault(str(number), {})
        kept |= {
            VALIDATION + name.removeprefix("eval/"): value
            for name, value in found.items()
            if name.removeprefix("eval/") in KEPT
        }
        if number == 0:
            shown = ", ".join(
                f"{name.replace('eval/', 'held-out ')} {value:.4g}"
                for name, value in sorted(found.items())
            )
            self._journal.notify(f"before training: {shown}")
        return found

    def measure(self) -> dict[str, float]:
        """Switches to the training phase, and returns metrics over all held-out rows.

        `eval/loss` is the algorithm's loss. `eval/perplexity`, only if a policy is trained, is the
        exponential of the mean negative log-likelihood per token of good responses, in nats.
        `eval/preference/*` are the metrics that a training step records for pairs or labels,
        averaged over batches of the same size as in a step.
        """
        self._phases.enter_training()
        size, needs = self._steps.prompts_per_step, self._algorithm.needs
        nats, num_tokens, sums = 0.0, 0, dict[str, tuple[float, int]]()
        with self._journal.phase("evaluate"):
            for start in range(0, len(self._prompts), size):
                prompts = list(self._prompts[start : start + size])
                batch = supervised_batch(prompts, needs.feedback)
                batch = self._roles.add_columns(
                    self._algorithm,
                    batch,
                    needs_old_logps=needs.policy,
                    temperature=TERM_TEMPERATURE,
                )
                if needs.policy:
                    logp, num = _likelihood(batch, needs.feedback is not None)
                    nats, num_tokens = nats - logp, num_tokens + num
                if needs.feedback is not None:
                    with self._roles.world.all_agree("estimating advantages of held-out rows"):
                        batch = self._algorithm.advantages(batch)
                    for name, value in feedback_metrics(batch).items():
                        before, num = sums.get(name, (0.0, 0))
                        sums[name] = before + value * len(prompts), num + len(prompts)
        means = {name: total / num for name, (total, num) in sums.items()}
        found = {f"eval/{name}": value for name, value in means.items() if name != "policy/loss"}
        if num_tokens:
            mean = nats / num_tokens
            found["eval/loss"] = mean
            found["eval/perplexity"] = math.exp(min(mean, MAX_PERPLEXITY_NATS))
        if "policy/loss" in means:
            found["eval/loss"] = means["policy/loss"]
        return found


def _likelihood(batch: TrainBatch, has_feedback: bool) -> tuple[float, int]:
    """Returns the log-likelihood, in nats, and the number of tokens of all responses, or, with
    feedback, of the good ones.
    """
    good_B = torch.ones(batch.num_samples, dtype=torch.bool)
    if has_feedback:
        good_B = batch.reward_B > 0
    if UNRELATED in batch.reward_parts:
        good_B = good_B & (batch.reward_parts[UNRELATED] == 0)
    logp_B = response_sums(batch.require("old_logp_T", "the validation loss"), batch)
    return float(logp_B[good_B].sum()), int(batch.response_lengths_B[good_B].sum())
