"""The section `environment`: the environment that answers the policy between its turns. No torch."""

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
    """Environment of multi-turn responses. reward.on_error decides what happens when it fails."""

    name: str | None = None
    """Name of an environment, or 'package.module:Class' for your own. By default there is none, and a response is one turn."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class. By default the class's own defaults apply."""
    max_turns: int = Field(8, ge=1)
    """Most turns of the policy in one response. The default 8 allows several tool calls and the answer; longer responses rarely succeed."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Most tokens in one turn. By default the limit is the rest of rollout.max_new_tokens, which holds all turns and observations together."""
    reward_sees: Literal["last_turn", "response"] = "last_turn"
    """Part of the response that reward functions receive: 'last_turn' is the text after the last observation; 'response' is all of it. The default is 'last_turn', so that no observation counts as an answer."""
    isolated: bool | None = None
    """Whether the environment runs in processes that can be killed. By default your own class and 'tools' do; 'calculator' does not, because it cannot hang."""
    timeout_s: float = Field(60.0, gt=0)
    """Wall-clock limit of one step in a process, in seconds. The default 60 is far above any tool."""
    workers: int = Field(2, ge=1)
    """Environment processes per rank. The default 2 keeps up with cheap tools while eight ranks share a host."""

    @model_validator(mode="after")
    def _check_named(self) -> Self:
        if self.name is None:
            for name, field in EnvironmentConfig.model_fields.items():
                if getattr(self, name) != field.get_default():
                    raise ValueError(f"{name}: only with environment.name")
        return self


def environment_rules(
    environment: EnvironmentConfig, reward: RewardConfig, max_new_tokens: int
) -> Iterator[UserError]:
    """Yields the violations between the environment and other sections."""
    named = [name for name, scorer in reward.scorers().items() if scorer.function == REWARD]
    if len(named) > 1:
        yield UserError(
            "reward.functions",
            f"function {REWARD} in {', '.join(named)}",
            "at most one scorer with it, because all would be the same sum",
            "Keep one, with the sum of their weights.",
        )
    if environment.name is None and named:
        yield UserError(
            "reward.function",
            REWARD,
            "another function without environment.name, which provides these rewards",
            "Set environment.name, or another reward.function.",
        )
    longest = environment.max_turn_tokens
    if longest is not None and longest > max_new_tokens:
        yield UserError(
            "environment.max_turn_tokens",
            longest,
            f"at most rollout.max_new_tokens = {max_new_tokens}, which holds all turns",
            "Lower it, or raise rollout.max_new_tokens.",
        )
