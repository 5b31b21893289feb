"""The section `eval`: sampling in evaluations, and public evaluation sets. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.agent import REWARD as REPORTED
from hybridrl.config.environment import REWARD as TURNS
from hybridrl.config.lists import Counts, Paths
from hybridrl.config.reward import SERVED, RewardConfig, ScorerConfig
from hybridrl.config.section import Section
from hybridrl.errors import UserError

IN_WORLD = (SERVED, TURNS, REPORTED)  # rewards that only the trainer can compute
SetForm = Literal["gsm8k", "math", "aime", "choices", "ifeval", "prompts"]
# Default scorer of each form.
FORM_SCORERS: Mapping[str, ScorerConfig] = {
    "gsm8k": ScorerConfig(function="gsm8k", options={"method": "flexible"}),
    "math": ScorerConfig(function="math", timeout_s=20.0),
    "aime": ScorerConfig(function="math", timeout_s=20.0),
    "choices": ScorerConfig(function="choice"),
    "ifeval": ScorerConfig(function="instructions", timeout_s=20.0),
    "prompts": ScorerConfig(),
}


class EvalSetConfig(Section):
    """An evaluation set, in addition to the held-out rows of the section `data`."""

    form: SetForm
    """Format of the rows, which determines how they are read and scored: gsm8k, math (MATH-500), aime, choices (MMLU, MMLU-Pro, ARC), ifeval, or prompts (a prompt and an answer). Required."""
    path: Paths = None
    """Source or list of sources, as in data.prompts. Required."""
    instruction: str | None = None
    """Text that is appended to each question. The default depends on the form, for example a request for a boxed answer."""
    scorer: ScorerConfig | None = None
    """Scorer of the responses, which must return scores from 0 to 1. The default depends on the form; for prompts it is exact_match."""
    limit: int | None = Field(None, ge=1)
    """If set, only this many rows are evaluated, starting from the first. By default all are evaluated, so that results are comparable."""
    samples_per_prompt: int | None = Field(None, ge=1)
    """Responses per prompt. The default is eval.samples_per_prompt."""

    @property
    def scored_by(self) -> RewardConfig:
        """Reward section of the set. A response that cannot be scored counts as 0."""
        scorer = self.scorer or FORM_SCORERS[self.form]
        return RewardConfig(**scorer.model_dump(), on_error="value")


class EvalConfig(Section):
    """Settings of evaluations, both in `hybridrl eval` and during training (steps.eval_every)."""

    samples_per_prompt: int = Field(1, ge=1)
    """Number of responses per prompt; accuracy is averaged over them. The default, 1, is enough for greedy sampling."""
    temperature: float = Field(0.0, ge=0)
    """Sampling temperature in evaluations. The default, 0, is greedy and therefore repeatable; set it above 0 for several samples per prompt."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Maximum length of a response in evaluations, in tokens. The default is rollout.max_new_tokens, as in training."""
    pass_k: Counts = ()
    """Values of k for which pass@k is reported; none may exceed the number of samples per prompt. The default is none, because accuracy already is pass@1."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Additional evaluation sets, by the name used in their metrics. By default only data.eval_prompts is evaluated."""

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        for name, one in self.sets.items():
            if not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"sets: names of letters, digits, _ and -, unlike {name!r}")
            if not one.path:
                raise ValueError(f"a source in sets.{name}.path, instead of {one.path!r}")
        return self

    def most_new_tokens(self, in_training: int) -> int:
        """Returns the maximum response length, in tokens, over training and evaluations."""
        return max(in_training, self.max_new_tokens or 0)

    def samples_of(self, one: EvalSetConfig) -> int:
        return one.samples_per_prompt or self.samples_per_prompt


def evaluation_rules(section: EvalConfig, reward: RewardConfig) -> Iterator[UserError]:
    """Yields violated rules between knobs of the section, and between names of sets and scorers."""
    sizes = {"eval.samples_per_prompt": section.samples_per_prompt}
    for name, one in section.sets.items():
        sizes[f"eval.sets.{name}.samples_per_prompt"] = section.samples_of(one)
    key, most = max(sizes.items(), key=lambda item: item[1])
    if most > 1 and section.temperature == 0:
        allowed = "1 with eval.temperature=0, because all greedy responses to a prompt are equal"
        yield UserError(key, most, allowed, "Set eval.temperature, for example to 0.7.")
    if section.pass_k and max(section.pass_k) > most:
        allowed = f"at most the samples per prompt, {most}"
        yield UserError(
            "eval.pass_k", list(section.pass_k), allowed, "Raise eval.samples_per_prompt."
        )
    for name, one in section.sets.items():
        function = one.scored_by.function
        if function in IN_WORLD:
            allowed = (
                "a reward function; evaluation sets support neither environments nor reward models"
            )
            remedy = "Choose another function, or use data.eval_prompts."
            yield UserError(f"eval.sets.{name}.scorer.function", function, allowed, remedy)
        if name in reward.scorers():
            allowed = "a name that no scorer in the section reward has, because both names are used for metrics"
            yield UserError("eval.sets", name, allowed, "Rename the set or the scorer.")
