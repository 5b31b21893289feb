"""The section `environment`, which responds to the policy between its turns. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.reward import RewardConfig
from hybridrl.config.section import Section
from hybridrl.errors import UserError

REWARD = "environment"
"""Reward function that returns the sum of the environment's rewards."""


class EnvironmentConfig(Section):
    """Environment for multi-turn responses. reward.on_error decides what happens when the environment fails."""

    name: str | None = None
    """Name of an environment, or 'package.module:Class' for your own. By default there is no environment, and each response has a single turn."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class. By default the class's own defaults apply."""
    max_turns: int = Field(8, ge=1)
    """Maximum number of the policy's turns in one response. The default, 8, allows several tool calls and the answer; longer responses rarely succeed."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens in one turn. By default a turn may use everything left of rollout.max_new_tokens, which limits all turns and observations together."""
    reward_sees: Literal["last_turn", "response"] = "last_turn"
    """Part of the response that reward functions receive: 'last_turn' is the text after the last observation; 'response' is all of it. The default is 'last_turn', so that an observation is never mistaken for an answer."""
    isolated: bool | None = None
    """Whether the environment runs in separate processes, which can be killed. By default 'tools' and your own classes do; 'calculator' does not, because it cannot hang."""
    timeout_s: float = Field(60.0, gt=0)
    """Wall-clock limit for one environment step in a separate process, in seconds. The default, 60, is far longer than tools usually take."""
    workers: int = Field(2, ge=1)
    """Number of environment processes per rank. The default, 2, is enough for cheap tools when eight ranks share a host."""

    @model_validator(mode="after")
    def _check_named(self) -> Self:
        if self.name is None:
            for name, field in EnvironmentConfig.model_fields.items():
                if getattr(self, name) != field.get_default():
                    raise ValueError(f"{name}: no value unless environment.name is set")
        return self


def environment_rules(
    environment: EnvironmentConfig, reward: RewardConfig, max_new_tokens: int
) -> Iterator[UserError]:
    named = [name for name, scorer in reward.scorers().items() if scorer.function == REWARD]
    if len(named) > 1:
        found, reason = f"function {REWARD} in {', '.join(named)}", "all would return the same sum"
        allowed = f"at most one scorer with function {REWARD}, because {reason}"
        remedy = "Keep one of these scorers, and give it the sum of their weights."
        yield UserError("reward.functions", found, allowed, remedy)
    if environment.name is None and named:
        reason = "because environment.name is not set and no environment provides rewards"
        allowed = f"another function, {reason}"
        remedy = "Set environment.name, or another reward.function."
        yield UserError("reward.function", REWARD, allowed, remedy)
    longest = environment.max_turn_tokens
    if longest is not None and longest > max_new_tokens:
        allowed = (
            f"at most rollout.max_new_tokens = {max_new_tokens}, which limits all turns together"
        )
        remedy = "Lower environment.max_turn_tokens, or raise rollout.max_new_tokens."
        yield UserError("environment.max_turn_tokens", longest, allowed, remedy)
