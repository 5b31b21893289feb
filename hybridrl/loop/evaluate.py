"""Evaluation: generates responses to held-out prompts (greedily by default) and scores them.

The reward is the same weighted sum of scores as in training. The accuracy is the score of a single
scorer, from 0 to 1. Public evaluation sets (`eval.sets`) have their own scorers.
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
from hybridrl.contracts.batch import Prompt, SampleValues, ScoredBatch
from hybridrl.errors import MISSING, UserError
from hybridrl.generation.sampler import Sampler
from hybridrl.loop.engine_phases import EnginePhases
from hybridrl.loop.journal import Journal
from hybridrl.loop.observers import Observer, is_due
from hybridrl.metrics.estimates import Estimate, majority_score, mean_of, pass_at_k
from hybridrl.metrics.values import STDERR, VALIDATION
from hybridrl.rewards.base import Scorer
from hybridrl.rewards.traits import traits_of

# Request seeds in evaluations use this number instead of the step, so that every evaluation uses
# the same seeds.
EVALUATION_STEP = -2
Answers = Mapping[int, str | None]
"""Answer in each response, by sample number; None if a response contains no answer."""


@dataclasses.dataclass(frozen=True)
class EvaluationSet:
    """Prompts to evaluate on, scored by the run's scorer if they have none."""

    prompts: Sequence[Prompt]
    reward: RewardConfig
    samples_per_prompt: int = 1
    scorer: Scorer | None = None


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores of responses to held-out prompts."""

    reward: float | None  # mean reward over responses; None if only `sets` were evaluated
    accuracy: float | None  # mean score, from 0 to 1, of the scorer that defines it
    scores: Mapping[str, float]
    num_prompts: int
    num_scored: int  # number of responses with a score that `reward.on_error` does not drop
    note: str = ""  # reason why there is no accuracy
    samples_per_prompt: int = 1
    accuracy_stderr: float | None = None  # standard error of the accuracy over prompts
    # By k, the probability that at least one of k responses is right (has score 1).
    pass_at: Mapping[int, Estimate] = dataclasses.field(default_factory=dict)
    majority: Estimate | None = None  # mean score of each prompt's most frequent answer
    num_errors: int = 0  # number of responses on which a scorer failed or timed out
    # Results of `eval.sets`.
    sets: Mapping[str, Evaluation] = dataclasses.field(default_factory=dict)

    @property
    def num_asked(self) -> int:
        return self.num_prompts * self.samples_per_prompt

    def metrics(self) -> dict[str, float]:
        """Returns the evaluation as metrics, with names that start with `eval/`."""
        scores = self.scores if len(self.scores) > 1 else {}
        found = {f"eval/{name}": score for name, score in scores.items()}
        found |= {f"eval/{name}": value for name, value in self._figures().items()}
        if self.num_scored < self.num_asked:
            found["eval/scored_share"] = self.num_scored / self.num_asked
        for name, result in self.sets.items():
            found |= {f"eval/{name}/{key}": value for key, value in result._figures().items()}
        return found

    def _figures(self) -> dict[str, float]:
        found = {} if self.reward is None else {"reward": self.reward}
        estimates = {f"pass_at_{k}": estimate for k, estimate in self.pass_at.items()}
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
        """Returns what a run stores: `reward`, `accuracy`, scorers, sets and standard errors."""
        own = {"reward", "accuracy", "accuracy" + STDERR}
        kept = dict(self.scores) if len(self.scores) > 1 else {}
        kept |= {key: value for key, value in self._figures().items() if key in own}
        for name, result in self.sets.items():
            figures = result._figures()
            kept |= {f"{name}/{k}": v for k, v in figures.items() if k in own - {"reward"}}
        return kept

    def as_json(self) -> dict[str, Any]:
        found = {**vars(self), "scores": dict(self.scores)}
        found["pass_at"] = {str(k): estimate._asdict() for k, estimate in self.pass_at.items()}
        found["majority"] = None if self.majority is None else self.majority._asdict()
        found["sets"] = {name: result.as_json() for name, result in self.sets.items()}
        return found


class Evaluations:
    """Stores the results of a run's evaluations, and decides when the next one is due. `by_step`
    has `reward`, `accuracy` if defined, and validation results that begin with VALIDATION.
    """

    def __init__(
        self,
        steps: StepsConfig,
        section: EvalConfig,
        own: EvaluationSet,
        sets: Mapping[str, EvaluationSet],
    ) -> None:
        self.by_step: dict[str, dict[str, float]] = {}
        self._is_note_reported = False
        self._steps, self._section, self._own, self._sets = steps, section, own, sets

    def are_due(self, step: int, last: int) -> bool:
        """Whether an evaluation after this step is missing: it is due, or would be the first."""
        if not self.have_prompts or str(step) in self._generated_steps():
            return False
        is_first = not self._generated_steps() or step == 0
        return is_first or is_due(self._steps.eval_every, step, last)

    def _generated_steps(self) -> set[str]:
        return {
            step
            for step, found in self.by_step.items()
            if any(not key.startswith(VALIDATION) for key in found)
        }

    @property
    def have_prompts(self) -> bool:
        return bool(self._own.prompts or self._sets)

    def reach_goal(self, step: int) -> bool:
        """Whether the evaluation after this step reached the accuracy `steps.stop_at_accuracy`."""
        goal = self._steps.stop_at_accuracy
        newest = self.by_step.get(str(step), {}).get("accuracy")
        return goal is not None and newest is not None and newest >= goal

    def measure(
        self,
        sampler: Sampler,
        temperature: float | None = None,
        before_scoring: Callable[[], None] | None = None,
    ) -> Evaluation:
        """Evaluates now; collective. The result is the same on all ranks."""
        section = self._section
        if temperature is not None:
            section = section.model_copy(update={"temperature": temperature})
        # Evaluate the sets first, because scoring the responses to the run's own prompts may take
        # memory away from the engine.
        found = {name: evaluate(sampler, prompts, section) for name, prompts in self._sets.items()}
        if not self._own.prompts and found:
            note = "data.eval_prompts is not set"
            return Evaluation(None, None, {}, 0, 0, note, sets=found)
        own = evaluate(sampler, self._own, section, before_scoring)
        return dataclasses.replace(own, sets=found)

    def announce(self, step: int, notify: Callable[[str], None]) -> None:
        """Prints the size of the run's first evaluation, which delays the first step."""
        if not self._generated_steps():
            sets = [self._own, *self._sets.values()]
            num = sum(len(prompts.prompts) * prompts.samples_per_prompt for prompts in sets)
            notify(f"evaluating after step {step}: generating {num} responses")

    def keep(self, step: int, found: Evaluation, notify: Callable[[str], None]) -> None:
        """Stores the results for this step. If there is no accuracy, reports the reason once."""
        if found.note and found.num_prompts and not self._is_note_reported:
            self._is_note_reported = True
            which = "this evaluation reports" if self._generated_steps() else "evaluations report"
            notify(f"{which} the reward but no accuracy: {found.note}")
        self.by_step.setdefault(str(step), {}).update(found.record())

    def close(self) -> None:
        for prompts in self._sets.values():
            if prompts.scorer is not None:
                prompts.scorer.close()


class DueEvaluations(Observer):
    """Observer that evaluates the run whenever an evaluation is due."""

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
        """Evaluates now; see `Trainer.evaluate`."""
        self._phases.enter_rollout()
        # A reward model needs the memory that the engine uses during generation.
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
    """Generates and scores responses to each prompt; collective, with equal results. Raises
    UserError if there are no prompts, or if a score of `reward.accuracy` is outside 0 to 1.
    """
    if not what.prompts:
        raise UserError(
            "data.eval_prompts",
            MISSING,
            "prompts to evaluate on",
            "Set data.eval_prompts, data.eval_share or eval.sets.",
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
    """Returns all responses' answers if the accuracy's scorer extracts answers. Collective."""
    name = accuracy_part(scored, config)
    parts = {part.name: part.function for part in sampler.scorer.parts}
    answer = traits_of(parts[name]).answer if name in parts else None
    if answer is None:
        return None
    with sampler.world.all_agree("finding answers") as agreement:
        held = scored.sample_ids_B[scored.rows_H].tolist()
        texts = sampler.scorer.responses(scored)
        agreement.value = {n: answer(text) for n, text in zip(held, texts, strict=True)}
    return {n: text for answers in agreement.values for n, text in answers.items()}


def accuracy_part(scored: ScoredBatch, config: RewardConfig) -> str:
    """Returns the reward part that counts as accuracy, or "" if accuracy is not defined."""
    parts, name = scored.reward_parts, config.accuracy_scorer()
    if len(parts) == 1 or (name not in parts and not config.functions):
        return next(iter(parts))  # the first of several functions passed from Python
    return name if name is not None and name in parts else ""


def summarized(
    scored: ScoredBatch,
    num_prompts: int,
    config: RewardConfig,
    samples_per_prompt: int = 1,
    pass_k: Sequence[int] = (),
    answers: Answers | None = None,
) -> Evaluation:
    samples = scored.by_sample()
    parts = samples.reward_parts
    means = {name: float(score_B.mean()) for name, score_B in parts.items()}
    reward = float(samples.reward_B.mean())
    found = Evaluation(reward, None, means, num_prompts, samples.num_samples)
    found = dataclasses.replace(found, samples_per_prompt=samples_per_prompt)
    name = accuracy_part(scored, config)
    if not name:
        note = f"set reward.accuracy to one of {', '.join(parts)}"
        return dataclasses.replace(found, note=note)
    lowest, highest = float(parts[name].min()), float(parts[name].max())
    outside = lowest if lowest < 0 else highest if highest > 1 else None
    if outside is not None and config.accuracy is not None:
        raise UserError(
            "reward.accuracy",
            f"{name}, which gave a score of {outside:g}",
            "a scorer with scores from 0 to 1",
            "Set reward.accuracy to another scorer or to null.",
        )
    if outside is not None:
        note = f"{name} gave a score of {outside:g}, outside 0 to 1"
        return dataclasses.replace(found, note=note)
    groups = _by_prompt(samples, parts[name].tolist(), answers)
    return dataclasses.replace(found, **_accuracies(groups, samples_per_prompt, pass_k, answers))


Group = tuple[list[float], list[str | None]]
"""Scores and answers for the samples of one prompt."""


def _by_prompt(
    samples: SampleValues, scores: Sequence[float], answers: Answers | None
) -> list[Group]:
    found: dict[int, Group] = {}
    numbers = samples.group_B.tolist(), samples.sample_ids_B.tolist()
    for group, sample, score in zip(*numbers, scores, strict=True):
        own_scores, own_answers = found.setdefault(group, ([], []))
        own_scores.append(score)
        own_answers.append(answers[sample] if answers is not None else None)
    return list(found.values())


def _accuracies(
    groups: Sequence[Group], samples_per_prompt: int, pass_k: Sequence[int], answers: Answers | None
) -> dict[str, Any]:
    """Returns the accuracy and, with several samples per prompt, pass@k and majority."""
    mean = mean_of([float(np.mean(scores)) for scores, _ in groups])
    found: dict[str, Any] = {"accuracy": mean.value, "accuracy_stderr": mean.stderr, "pass_at": {}}
    for k in (k for k in pass_k if k <= samples_per_prompt):
        # Prompts with fewer than k scored responses do not count.
        counts = [(len(s), sum(score >= 1 for score in s)) for s, _ in groups if len(s) >= k]
        if counts:
            found["pass_at"][k] = mean_of([pass_at_k(*count, k) for count in counts])
    if samples_per_prompt > 1 and answers is not None:
        found["majority"] = mean_of([majority_score(texts, scores) for scores, texts in groups])
    return found
