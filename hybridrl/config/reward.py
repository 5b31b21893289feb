"""The section `reward`: scorers with weights, and what happens when one fails. No torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.section import Section

# Rewards whose score, from 0 to 1, measures whether the answer is correct.
JUDGES_ANSWERS = ("exact_match", "gsm8k", "math", "code", "choice")
# Reward whose option `path` names a model.
SERVED = "reward_model"
# Names that scorers must not have, because other metrics use them (reward/mean, eval/accuracy).
NOT_NAMES = ("mean", "std", "accuracy", "reward", "majority")


class ScorerConfig(Section):
    """A scorer: its function, and how the function is run."""

    function: str = "exact_match"
    """Name of a built-in reward, or 'package.module:function' for your own. The default, 'exact_match', needs no judge model."""
    extract: str | None = None
    """Regular expression that finds the answer in the response: group 1 of the last match (exact_match only). By default the answer is the whole response."""
    options: dict[str, Any] = {}
    """Keyword arguments for the function. By default the function's own defaults apply."""
    weight: float = 1.0
    """Factor by which the score is multiplied in the reward. The default, 1, keeps the score unchanged."""
    isolated: bool | None = None
    """Whether the function runs in separate processes, which can be killed. By default this is on for functions that may hang or crash (regex, math, your own)."""
    timeout_s: float = Field(60.0, gt=0)
    """Wall-clock limit for one call in a separate process, in seconds. The default, 60, is far longer than rule-based rewards take."""
    workers: int = Field(2, ge=1)
    """Number of scoring processes or threads per rank. The default, 2, is enough for rule-based rewards when eight ranks share a host."""


class RewardConfig(ScorerConfig):
    """How responses are scored: by `function`, or by the weighted sum of `functions`."""

    functions: dict[str, ScorerConfig] = {}
    """Several scorers in place of `function`, by the name used in their metrics. By default there is one scorer."""
    on_error: Literal["stop", "drop", "value"] = "stop"
    """What happens when a scorer hangs, crashes, raises an exception or returns something other than a number: 'stop' ends the run, 'drop' discards the response, 'value' uses error_value as the score. The default is 'stop', because a model should not be trained with a broken scorer."""
    error_value: float = 0.0
    """Score to use when a scorer fails; requires on_error=value. The default, 0, means no reward."""
    accuracy: str | None = None
    """Name of the scorer in 'functions' whose score, from 0 to 1, is reported as accuracy in evaluations. The default is the only scorer, or the only one among the scorers whose function is exact_match, gsm8k, math, code or choice."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.functions:
            for name, field in ScorerConfig.model_fields.items():
                if getattr(self, name) != field.get_default():
                    raise ValueError(f"{name}: no value if functions is set")
        if self.accuracy is not None and self.accuracy not in self.functions:
            known = ", ".join(self.functions) or "null unless functions is set"
            raise ValueError(f"accuracy: {known}")
        for name in self.functions:
            if not name.replace("_", "").replace("-", "").isalnum() or name in NOT_NAMES:
                others = ", ".join(NOT_NAMES)
                raise ValueError(
                    f"functions: names of letters, digits, _ and -, unlike {name!r}; {others} are "
                    "reserved"
                )
        if self.error_value and self.on_error != "value":
            raise ValueError(f"error_value: no value unless on_error=value (it is {self.on_error})")
        return self

    def accuracy_scorer(self) -> str | None:
        """Returns the scorer whose score is the accuracy; None if the choice is ambiguous."""
        scorers = self.scorers()
        if self.accuracy is not None or len(scorers) == 1:
            return self.accuracy or next(iter(scorers))
        judging = [name for name in scorers if scorers[name].function in JUDGES_ANSWERS]
        return judging[0] if len(judging) == 1 else None

    def scorers(self) -> dict[str, ScorerConfig]:
        """Returns every scorer, by the name used in its metrics."""
        if self.functions:
            return dict(self.functions)
        own = {name: getattr(self, name) for name in ScorerConfig.model_fields}
        return {self.function: ScorerConfig(**own)}
