"""The section `reward`: one scorer, or several with weights, and the treatment of failures. No
torch.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.section import Section

# Rewards whose score, from 0 to 1, measures correctness.
JUDGES_ANSWERS = ("exact_match", "gsm8k", "math", "code", "choice")
# Reward whose option `path` names a model.
SERVED = "reward_model"
# Names of other metrics, such as reward/mean and eval/accuracy, which scorers must not have.
NOT_NAMES = ("mean", "std", "accuracy", "reward", "majority")


class ScorerConfig(Section):
    """One scorer: a function and how it runs."""

    function: str = "exact_match"
    """Name of a reward, or 'package.module:function' for your own. The default 'exact_match' needs no judge."""
    extract: str | None = None
    """Regular expression; group 1 of its last match is the answer (exact_match). By default the answer is the whole response."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function, batched or not. By default the function's own defaults apply."""
    weight: float = 1.0
    """Factor of the score in the reward. The default 1 keeps the score."""
    isolated: bool | None = None
    """Whether the function runs in processes that can be killed. By default functions that may hang or crash do (regex, math, your own)."""
    timeout_s: float = Field(60.0, gt=0)
    """Wall-clock limit of one call in a process, in seconds. The default 60 is far above any rule."""
    workers: int = Field(2, ge=1)
    """Scoring processes or threads per rank. The default 2 keeps up with rules while eight ranks share a host."""


class RewardConfig(ScorerConfig):
    """How a response is scored: by `function`, or by the weighted sum of `functions`."""

    functions: dict[str, ScorerConfig] = {}
    """Several scorers, by the name of their metrics, in place of `function`. By default there is one scorer."""
    on_error: Literal["stop", "drop", "value"] = "stop"
    """What happens when a scorer hangs, dies, raises or returns no number: 'stop' ends the run, 'drop' leaves the response out, 'value' scores 'error_value'. The default is 'stop', because a broken scorer should not train a model."""
    error_value: float = 0.0
    """Score of a failed scorer, only with on_error=value. The default 0 is no reward."""
    accuracy: str | None = None
    """Scorer in 'functions' whose score, from 0 to 1, is the accuracy of evaluations. The default is the only scorer, or the only one of exact_match, gsm8k, math, code and choice."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.functions:
            for name, field in ScorerConfig.model_fields.items():
                if getattr(self, name) != field.get_default():
                    raise ValueError(f"{name}: only without functions")
        if self.accuracy is not None and self.accuracy not in self.functions:
            known = ", ".join(self.functions) or "no value without functions"
            raise ValueError(f"accuracy: {known}, not {self.accuracy!r}")
        for name in self.functions:
            if not name.replace("_", "").replace("-", "").isalnum() or name in NOT_NAMES:
                others = ", ".join(NOT_NAMES)
                raise ValueError(
                    f"functions: names of letters, digits, _ and -, except {others}; not {name!r}"
                )
        if self.error_value and self.on_error != "value":
            raise ValueError(f"error_value: only with on_error=value, not {self.on_error}")
        return self

    def accuracy_scorer(self) -> str | None:
        """Returns the name of the scorer whose score is the accuracy; None if it is unknown."""
        scorers = self.scorers()
        if self.accuracy is not None or len(scorers) == 1:
            return self.accuracy or next(iter(scorers))
        judging = [name for name in scorers if scorers[name].function in JUDGES_ANSWERS]
        return judging[0] if len(judging) == 1 else None

    def scorers(self) -> dict[str, ScorerConfig]:
        """Returns every scorer by the name of its metrics."""
        if self.functions:
            return dict(self.functions)
        own = {name: getattr(self, name) for name in ScorerConfig.model_fields}
        return {self.function: ScorerConfig(**own)}
