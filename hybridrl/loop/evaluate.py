"""Evaluation: responses to held-out prompts, greedy unless told otherwise, and what they score.

The reward is the weighted sum that training uses. The accuracy is the score of one scorer, which
says from 0 to 1 how right a response is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from hybridrl.config.reward import RewardConfig
from hybridrl.config.schema import StepsConfig
from hybridrl.contracts.batch import Prompt, ScoredBatch
from hybridrl.errors import UserError
from hybridrl.generation.sampler import Sampler
from hybridrl.loop.schedule import is_due

# Enters the seeds in place of a step number: evaluation at a temperature samples the same way every
# time.
EVALUATION_STEP = -2


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What responses to held-out prompts scored.

    Args:
        reward: mean of the weighted sum.
        accuracy: mean of the accuracy's scorer; None: no scorer is one, or a score is outside 0 to
            1.
        scores: mean of each scorer, unweighted, by name.
        num_prompts: prompts that were asked.
        num_scored: responses that have a score; fewer where `reward.on_error` drops some.
        note: why there is no accuracy, for people; empty where there is one.
    """

    reward: float
    accuracy: float | None
    scores: Mapping[str, float]
    num_prompts: int
    num_scored: int
    note: str = ""

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of a step in which this was measured."""
        scores = self.scores if len(self.scores) > 1 else {}
        found = {"eval/reward": self.reward, **{f"eval/{n}": v for n, v in scores.items()}}
        if self.accuracy is not None:
            found["eval/accuracy"] = self.accuracy
        if self.num_scored < self.num_prompts:
            found["eval/scored_share"] = self.num_scored / self.num_prompts
        return found

    def record(self) -> dict[str, float]:
        """Returns what a run keeps of it: `reward`, and `accuracy` if there is one."""
        accuracy = {} if self.accuracy is None else {"accuracy": self.accuracy}
        return {"reward": self.reward, **accuracy}


class Evaluations:
    """What a run's evaluations found, and when the next one is due.

    Attributes:
        by_step: `reward`, and `accuracy` if there is one, by the number of finished steps.

    Args:
        steps: says how often.
        has_prompts: whether there is anything to evaluate on.
    """

    def __init__(self, steps: StepsConfig, has_prompts: bool) -> None:
        self.by_step: dict[str, dict[str, float]] = {}
        self._steps, self._has_prompts = steps, has_prompts

    def are_due(self, step: int, last: int) -> bool:
        """Whether one is due after `step` of `last`, the first of all or a later one, and was not
        made, perhaps as a signal came.
        """
        if not self._has_prompts or str(step) in self.by_step:
            return False
        is_first = not self.by_step or step == 0
        return is_first or is_due(self._steps.eval_every, step, last)

    def reach_goal(self, step: int) -> bool:
        """Whether the one of this step has found the accuracy that a run may stop at."""
        goal = self._steps.stop_at_accuracy
        newest = self.by_step.get(str(step), {}).get("accuracy")
        return goal is not None and newest is not None and newest >= goal


def evaluate(
    sampler: Sampler,
    prompts: Sequence[Prompt],
    config: RewardConfig,
    temperature: float = 0.0,
    before_scoring: Callable[[], None] | None = None,
) -> Evaluation:
    """Scores one response to each prompt; collective, the same on all ranks.

    Args:
        sampler: with the weights to evaluate in its engine.
        prompts: the same on all ranks.
        config: the section that names the scorers.
        temperature: 0 is greedy.
        before_scoring: called when all responses are generated.

    Raises:
        UserError: there are no prompts, or a score of the scorer that `reward.accuracy` names is
            outside 0 to 1.
    """
    if not prompts:
        raise UserError(
            "data.eval_prompts",
            "nothing",
            "prompts to evaluate on",
            "Set data.eval_prompts to a file, or data.eval_share.",
        )
    sampling = dataclasses.replace(sampler.sampling, temperature=temperature)
    local = sampler.generate(prompts, samples_per_prompt=1, step=EVALUATION_STEP, sampling=sampling)
    if before_scoring is not None:
        before_scoring()
    return summarized(sampler.score(local), len(prompts), config)


def summarized(scored: ScoredBatch, num_prompts: int, config: RewardConfig) -> Evaluation:
    """Returns what scored responses, one a prompt, amount to; arguments as of `evaluate`."""
    parts = {name: score_B for name, score_B in scored.reward_parts.items()}
    name = next(iter(parts)) if len(parts) == 1 else config.accuracy_scorer()
    accuracy, note = None, ""
    if name is None or name not in parts:
        note = f"which of {', '.join(parts)} is the accuracy is not known: set reward.accuracy"
    else:
        lowest, highest = float(parts[name].min()), float(parts[name].max())
        outside = lowest if lowest < 0 else highest if highest > 1 else None
        if outside is not None and config.accuracy is not None:
            raise UserError(
                "reward.accuracy",
                f"{name}, which gave a score of {outside:g}",
                "a scorer of scores from 0 to 1",
                "Name another scorer, or set reward.accuracy=null.",
            )
        if outside is None:
            accuracy = float(parts[name].mean())
        else:
            note = f"{name} gave a score of {outside:g}, so that it is no accuracy"
    means = {name: float(score_B.mean()) for name, score_B in parts.items()}
    reward = float(scored.reward_B.mean())
    return Evaluation(reward, accuracy, means, num_prompts, scored.num_samples, note)
