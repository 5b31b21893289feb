"""Evaluation: generates responses to held-out prompts, greedy by default, and scores them.

The reward is the weighted sum that training uses. The accuracy is the score of one scorer, from 0
to 1. Public sets (`eval.sets`) have scorers of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from hybridrl.config.evaluation import EvalConfig
from hybridrl.config.reward import RewardConfig
from hybridrl.config.schema import StepsConfig
from hybridrl.contracts.batch import Prompt, ScoredBatch
from hybridrl.errors import UserError
from hybridrl.generation.sampler import Sampler
from hybridrl.loop.engine_phases import EnginePhases
from hybridrl.loop.journal import Journal
from hybridrl.loop.observers import Observer, is_due
from hybridrl.metrics.estimates import Estimate, majority_score, mean_of, pass_at_k
from hybridrl.metrics.values import STDERR, VALIDATION
from hybridrl.rewards.base import Scorer
from hybridrl.rewards.traits import traits_of

# Enters the seeds in place of a step number: evaluation at a temperature samples the same way every
# time.
EVALUATION_STEP = -2
Answers = Mapping[int, str | None]
"""The answer in each response, by the number of the sample; None: there is none."""


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Prompts to evaluate on, with a scorer of their own or, None, with that of the run."""

    prompts: Sequence[Prompt]
    reward: RewardConfig
    samples_per_prompt: int = 1
    scorer: Scorer | None = None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores of responses to held-out prompts.

    Args:
        reward: Mean of the weighted sum; None: there are only prompts of `sets`.
        accuracy: Mean score of the accuracy's scorer; None: there is no such scorer, or a score is
            outside 0 to 1.
        num_scored: Responses with a score; fewer where `reward.on_error` drops some.
        note: Why there is no accuracy.
        accuracy_stderr: Standard error of the accuracy over prompts.
        pass_at: Probability that one of k responses is right (has a score of 1), by k.
        majority: Score of the most frequent answer to a prompt; None: there is one response a
            prompt, or the scorer knows no answers.
        num_errors: Responses on which a scorer failed, or was late.
        sets: Results of `eval.sets`, by name.
    """

    reward: float | None
    accuracy: float | None
    scores: Mapping[str, float]
    num_prompts: int
    num_scored: int
    note: str = ""
    samples_per_prompt: int = 1
    accuracy_stderr: float | None = None
    pass_at: Mapping[int, Estimate] = dataclasses.field(default_factory=dict)
    majority: Estimate | None = None
    num_errors: int = 0
    sets: Mapping[str, Evaluation] = dataclasses.field(default_factory=dict)

    @property
    def num_asked(self) -> int:
        """Responses that were asked for."""
        return self.num_prompts * self.samples_per_prompt

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of a step in which this was measured."""
        scores = self.scores if len(self.scores) > 1 else {}
        found = {f"eval/{name}": score for name, score in scores.items()}
        found |= {f"eval/{name}": value for name, value in self._figures().items()}
        if self.num_scored < self.num_asked:
            found["eval/scored_share"] = self.num_scored / self.num_asked
        for name, one in self.sets.items():
            found |= {f"eval/{name}/{key}": value for key, value in one._figures().items()}
        return found

    def _figures(self) -> dict[str, float]:
        found = {} if self.reward is None else {"reward": self.reward}
        estimates = {f"pass_at_{k}": one for k, one in self.pass_at.items()}
        if self.accuracy is not None:
            estimates["accuracy"] = Estimate(self.accuracy, self.accuracy_stderr)
        if self.majority is not None:
            estimates["majority"] = self.majority
        for name, (value, stderr) in estimates.items():
            found |= {name: value} | ({} if stderr is None else {name + STDERR: stderr})
        if self.num_errors:
            found["errors"] = self.num_errors
        return found

    def record(self) -> dict[str, float]:
        """Returns what a run keeps of it: `reward`, `accuracy` with its standard error if there is
        one, and the same of sets.
        """
        own = {"reward", "accuracy", "accuracy" + STDERR}
        kept = {key: value for key, value in self._figures().items() if key in own}
        for name, one in self.sets.items():
            kept |= {f"{name}/{k}": v for k, v in one._figures().items() if k in own - {"reward"}}
        return kept

    def as_json(self) -> dict[str, Any]:
        """Returns all of it as JSON has it."""
        found = {**vars(self), "scores": dict(self.scores)}
        found["pass_at"] = {str(k): one._asdict() for k, one in self.pass_at.items()}
        found["majority"] = None if self.majority is None else self.majority._asdict()
        found["sets"] = {name: one.as_json() for name, one in self.sets.items()}
        return found


class Evaluations:
    """Results of a run's evaluations, and when the next one is due.

    Attributes:
        by_step: `reward`, and `accuracy` if there is one, by the number of finished steps; and
            results of loop/validation.py, with VALIDATION before their names.
    """

    def __init__(
        self,
        steps: StepsConfig,
        section: EvalConfig,
        own: EvaluationSet,
        sets: Mapping[str, EvaluationSet],
    ) -> None:
        self.by_step: dict[str, dict[str, float]] = {}
        self._has_said_why = False
        self._steps, self._section, self._own, self._sets = steps, section, own, sets

    def are_due(self, step: int, last: int) -> bool:
        """Whether one is due after `step` of `last`, the first of all or a later one, and was not
        made, perhaps as a signal came.
        """
        if not self.have_prompts or str(step) in self._generated_steps():
            return False
        is_first = not self._generated_steps() or step == 0
        return is_first or is_due(self._steps.eval_every, step, last)

    def _generated_steps(self) -> set[str]:
        """Returns the steps after which responses were generated and scored."""
        return {
            step
            for step, found in self.by_step.items()
            if any(not key.startswith(VALIDATION) for key in found)
        }

    @property
    def have_prompts(self) -> bool:
        """Whether there is anything to generate responses to."""
        return bool(self._own.prompts or self._sets)

    def reach_goal(self, step: int) -> bool:
        """Whether the one of this step has found the accuracy that a run may stop at."""
        goal = self._steps.stop_at_accuracy
        newest = self.by_step.get(str(step), {}).get("accuracy")
        return goal is not None and newest is not None and newest >= goal

    def measure(
        self,
        sampler: Sampler,
        temperature: float | None = None,
        before_scoring: Callable[[], None] | None = None,
    ) -> Evaluation:
        """Evaluates now; collective, the same on all ranks."""
        section = self._section
        if temperature is not None:
            section = section.model_copy(update={"temperature": temperature})
        # Sets come first: scoring the run's own prompts may need the memory of the engine.
        found = {name: evaluate(sampler, one, section) for name, one in self._sets.items()}
        if not self._own.prompts and found:
            note = "there are no data.eval_prompts"
            return Evaluation(None, None, {}, 0, 0, note, sets=found)
        own = evaluate(sampler, self._own, section, before_scoring)
        return dataclasses.replace(own, sets=found)

    def announce(self, step: int, notify: Callable[[str], None]) -> None:
        """Says before the first evaluation, before any line of a step, how much it generates."""
        if not self._generated_steps():
            asked = [self._own, *self._sets.values()]
            num = sum(len(one.prompts) * one.samples_per_prompt for one in asked)
            notify(f"evaluating after step {step}: {num} responses are generated")

    def keep(self, step: int, found: Evaluation, notify: Callable[[str], None]) -> None:
        """Notes what was found for this step; says once why there is no accuracy."""
        if found.note and found.num_prompts and not self._has_said_why:
            self._has_said_why = True
            which = "this evaluation reports" if self._generated_steps() else "evaluations report"
            notify(f"{which} the reward and no accuracy: {found.note}")
        self.by_step.setdefault(str(step), {}).update(found.record())

    def close(self) -> None:
        """Ends what scores the sets' responses."""
        for one in self._sets.values():
            if one.scorer is not None:
                one.scorer.close()


class DueEvaluations(Observer):
    """Evaluates when an evaluation is due."""

    def __init__(
        self,
        *,
        evaluations: Evaluations,
        sampler: Sampler,
        phases: EnginePhases,
        journal: Journal,
    ) -> None:
        self._evaluations, self._sampler = evaluations, sampler
        self._phases, self._journal = phases, journal

    def measure(self, temperature: float | None = None) -> Evaluation:
        """Evaluates now, as `Trainer.evaluate` says."""
        self._phases.enter_rollout()
        # A reward model's pass needs the memory that the engine has while it generates.
        end_rollout = self._phases.enter_training if self._sampler.reward_models else None
        with self._journal.phase("evaluate"):
            return self._evaluations.measure(self._sampler, temperature, end_rollout)

    def measures(self, number: int, last: int) -> dict[str, float]:
        if not self._evaluations.are_due(number, last):
            return {}
        self._evaluations.announce(number, self._journal.notify)
        found = self.measure()
        self._evaluations.keep(number, found, self._journal.notify)
        return found.metrics()


def evaluate(
    sampler: Sampler,
    what: EvaluationSet,
    section: EvalConfig,
    before_scoring: Callable[[], None] | None = None,
) -> Evaluation:
    """Scores responses to each prompt; collective, the same on all ranks.

    Raises:
        UserError: There are no prompts, or a score of the scorer that `reward.accuracy` names is
            outside 0 to 1.
    """
    if not what.prompts:
        raise UserError(
            "data.eval_prompts",
            "nothing",
            "prompts to evaluate on",
            "Set data.eval_prompts to a file, or data.eval_share, or eval.sets.",
        )
    sampling = dataclasses.replace(sampler.sampling, temperature=section.temperature)
    if section.max_new_tokens is not None:
        sampling = dataclasses.replace(sampling, max_new_tokens=section.max_new_tokens)
    num = what.samples_per_prompt
    with nullcontext() if what.scorer is None else sampler.judged_by(what.scorer):
        local = sampler.generate(
            what.prompts, samples_per_prompt=num, step=EVALUATION_STEP, sampling=sampling
        )
        if before_scoring is not None:
            before_scoring()
        scored = sampler.score(local)
        answers = _answers(sampler, scored, what.reward) if num > 1 else None
    found = summarized(scored, len(what.prompts), what.reward, num, section.pass_k, answers)
    return dataclasses.replace(found, num_errors=sampler.num_errors())


def _answers(sampler: Sampler, scored: ScoredBatch, config: RewardConfig) -> Answers | None:
    """Returns the answers of all samples, as the accuracy's scorer finds them; None where it knows
    of none; collective.
    """
    name = accuracy_part(scored, config)
    parts = {part.name: part.function for part in sampler.scorer.parts}
    answer = traits_of(parts[name]).answer if name in parts else None
    if answer is None:
        return None
    with sampler.world.all_agree("finding answers") as agreement:
        held = scored.sample_ids_B[scored.rows_H].tolist()
        texts = sampler.scorer.responses(scored)
        agreement.value = {one: answer(text) for one, text in zip(held, texts, strict=True)}
    return {one: text for told in agreement.values for one, text in told.items()}


def accuracy_part(scored: ScoredBatch, config: RewardConfig) -> str:
    """Returns the name of the reward part that is the accuracy; empty: it is not known."""
    parts, name = scored.reward_parts, config.accuracy_scorer()
    if len(parts) == 1 or (name not in parts and not config.functions):
        return next(iter(parts))  # of several functions of a script the first
    return name if name is not None and name in parts else ""


def summarized(
    scored: ScoredBatch,
    num_prompts: int,
    config: RewardConfig,
    samples_per_prompt: int = 1,
    pass_k: Sequence[int] = (),
    answers: Answers | None = None,
) -> Evaluation:
    """Returns what scored responses amount to."""
    parts = {name: score_B for name, score_B in scored.reward_parts.items()}
    means = {name: float(score_B.mean()) for name, score_B in parts.items()}
    reward = float(scored.reward_B.mean())
    found = Evaluation(reward, None, means, num_prompts, scored.num_samples)
    found = dataclasses.replace(found, samples_per_prompt=samples_per_prompt)
    name = accuracy_part(scored, config)
    if not name:
        note = f"which of {', '.join(parts)} is the accuracy is not known: set reward.accuracy"
        return dataclasses.replace(found, note=note)
    lowest, highest = float(parts[name].min()), float(parts[name].max())
    outside = lowest if lowest < 0 else highest if highest > 1 else None
    if outside is not None and config.accuracy is not None:
        raise UserError(
            "reward.accuracy",
            f"{name}, which gave a score of {outside:g}",
            "a scorer of scores from 0 to 1",
            "Name another scorer, or set reward.accuracy=null.",
        )
    if outside is not None:
        note = f"{name} gave a score of {outside:g}, so that it is no accuracy"
        return dataclasses.replace(found, note=note)
    groups = _by_prompt(scored, parts[name].tolist(), answers)
    return dataclasses.replace(found, **_accuracies(groups, samples_per_prompt, pass_k, answers))


Group = tuple[list[float], list[str | None]]
"""Scores and answers of the samples of one prompt."""


def _by_prompt(
    scored: ScoredBatch, scores: Sequence[float], answers: Answers | None
) -> list[Group]:
    found: dict[int, Group] = {}
    samples = zip(scored.group_B.tolist(), scored.sample_ids_B.tolist(), scores, strict=True)
    for group, sample, score in samples:
        own_scores, own_answers = found.setdefault(group, ([], []))
        own_scores.append(score)
        own_answers.append(answers[sample] if answers is not None else None)
    return list(found.values())


def _accuracies(
    groups: Sequence[Group], samples_per_prompt: int, pass_k: Sequence[int], answers: Answers | None
) -> dict[str, Any]:
    """Returns the accuracy and what follows from several samples, as fields of Evaluation."""
    mean = mean_of([float(np.mean(scores)) for scores, _ in groups])
    found: dict[str, Any] = {"accuracy": mean.value, "accuracy_stderr": mean.stderr, "pass_at": {}}
    for k in (k for k in pass_k if k <= samples_per_prompt):
        # A prompt of which too many responses were dropped says nothing of k.
        counts = [(len(s), sum(one >= 1 for one in s)) for s, _ in groups if len(s) >= k]
        if counts:
            found["pass_at"][k] = mean_of([pass_at_k(*count, k) for count in counts])
    if samples_per_prompt > 1 and answers is not None:
        found["majority"] = mean_of([majority_score(texts, scores) for scores, texts in groups])
    return found
