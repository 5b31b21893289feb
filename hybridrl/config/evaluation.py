"""The section `eval`: how responses are drawn where a model is evaluated, and on which public sets.
No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.environment import REWARD as TURNS
from hybridrl.config.lists import Counts, Paths
from hybridrl.config.reward import SERVED, RewardConfig, ScorerConfig
from hybridrl.config.section import Section
from hybridrl.errors import UserError

IN_WORLD = (SERVED, TURNS)  # rewards that the trainer itself computes
SetForm = Literal["gsm8k", "math", "aime", "choices", "ifeval", "prompts"]
# What scores the responses to the rows of each form; `prompts` has what `scorer` says.
FORM_SCORERS: Mapping[str, ScorerConfig] = {
    "gsm8k": ScorerConfig(function="gsm8k", options={"method": "flexible"}),
    "math": ScorerConfig(function="math", timeout_s=20.0),
    "aime": ScorerConfig(function="math", timeout_s=20.0),
    "choices": ScorerConfig(function="choice"),
    "ifeval": ScorerConfig(function="instructions", timeout_s=20.0),
    "prompts": ScorerConfig(),
}


class EvalSetConfig(Section):
    """A set of held-out rows beside those of the section data."""

    form: SetForm
    """What its rows look like, as they were published: gsm8k, math (MATH-500), aime, choices (MMLU, MMLU-Pro, ARC), ifeval; prompts: a prompt and an answer. No default: it says how to read and score them."""
    path: Paths = None
    """Its source or list of sources, as in data.prompts. None is refused."""
    instruction: str | None = None
    """Text after each question. None: what the form asks for, such as the answer in a box."""
    scorer: ScorerConfig | None = None
    """What gives responses their score, from 0 to 1. None: the form's own; prompts have exact_match."""
    limit: int | None = Field(None, ge=1)
    """Evaluate the first N rows only. None: all, so that figures compare."""
    samples_per_prompt: int | None = Field(None, ge=1)
    """Responses to each of its prompts. None: eval.samples_per_prompt."""

    @property
    def scored_by(self) -> RewardConfig:
        """What scores its responses. One that a scorer fails on, late ones too, scores 0 and is
        counted: a set has rows by thousands, and what people wrote there is not checked.
        """
        scorer = self.scorer or FORM_SCORERS[self.form]
        return RewardConfig(**scorer.model_dump(), on_error="value")


class EvalConfig(Section):
    """How a model is evaluated: by `hybridrl eval`, and in training by steps.eval_every."""

    samples_per_prompt: int = Field(1, ge=1)
    """Responses to each prompt; accuracy is their mean. 1: a greedy response says it all."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature of evaluations. 0: greedy, which repeats; several samples need more."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest response in evaluations. None: rollout.max_new_tokens, as in training."""
    pass_k: Counts = ()
    """Each k of pass@k to report, at most the samples of a prompt. None: accuracy is pass@1."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Further sets to evaluate on, by the name that their metrics have. Empty: only data.eval_prompts."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name, one in self.sets.items():
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"sets: names of letters, digits, _ and -, not {name!r}")
            if not one.path:
                raise ValueError(f"sets.{name}.path: a source, not {one.path!r}")
        return self

    def most_new_tokens(self, in_training: int) -> int:
        """Returns the longest response that an engine is asked for, in training or evaluations."""
        return max(in_training, self.max_new_tokens or 0)

    def samples_of(self, one: EvalSetConfig) -> int:
        """Returns how many responses each prompt of a set gets."""
        return one.samples_per_prompt or self.samples_per_prompt


def evaluation_rules(section: EvalConfig, reward: RewardConfig) -> Iterator[UserError]:
    """Yields what is wrong between the knobs of the section, and with the names of scorers."""
    sizes = {"eval.samples_per_prompt": section.samples_per_prompt}
    for name, one in section.sets.items():
        sizes[f"eval.sets.{name}.samples_per_prompt"] = section.samples_of(one)
    key, most = max(sizes.items(), key=lambda item: item[1])
    if most > 1 and section.temperature == 0:
        allowed = "1 with eval.temperature=0, which gives the same response each time"
        yield UserError(key, most, allowed, "Set eval.temperature, for example to 0.7.")
    if section.pass_k and max(section.pass_k) > most:
        allowed = f"at most the samples of a prompt, {most}"
        yield UserError(
            "eval.pass_k", list(section.pass_k), allowed, "Raise eval.samples_per_prompt."
        )
    for name, one in section.sets.items():
        function = one.scored_by.function
        if function in IN_WORLD:
            allowed = "a function: a set has no environment, and no reward model is served for it"
            remedy = "Name another, or use data.eval_prompts."
            yield UserError(f"eval.sets.{name}.scorer.function", function, allowed, remedy)
        if name in reward.scorers():
            allowed = "a name that no scorer of the section reward has"
            yield UserError("eval.sets", name, allowed, "Rename one: both stand in the metrics.")
