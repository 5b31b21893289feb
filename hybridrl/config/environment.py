"""The section `environment`: what answers the policy between its turns, if anything. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.reward import RewardConfig
from hybridrl.config.section import Section
from hybridrl.errors import UserError

REWARD = "environment"
"""The reward function that stands for the sum of the environment's rewards."""


class EnvironmentConfig(Section):
    """The environment of a response's turns and how it is run; reward.on_error says what follows
    when it fails.
    """

    name: str | None = None
    """An environment's name, or 'package.module:Class'. None: a response is one turn, nothing answers it."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class. Empty: its own defaults."""
    max_turns: int = Field(8, ge=1)
    """Turns of the policy in one response. 8: several tool calls and the answer; what goes on longer is mostly lost."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Tokens of one turn. None: what is left of rollout.max_new_tokens, which holds all turns and observations together."""
    reward_sees: Literal["last_turn", "response"] = "last_turn"
    """What reward functions get as the response. 'last_turn': what follows the last observation, so that no observation passes for an answer; 'response': all of it."""
    isolated: bool | None = None
    """Run in processes that can be killed. None: your own class and 'tools' are, 'calculator', which cannot hang, is not."""
    timeout_s: float = Field(60.0, gt=0)
    """Wall-clock limit of one step in a process. 60: far above any tool."""
    workers: int = Field(2, ge=1)
    """Processes of one rank that environments run in. 2: keeps up with cheap tools while eight ranks share a host."""

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
    """Rules between the environment and other sections.

    Args:
        environment, reward: the sections.
        max_new_tokens: of `rollout`.
    """
    named = [name for name, scorer in reward.scorers().items() if scorer.function == REWARD]
    if len(named) > 1:
        yield UserError(
            "reward.functions",
            f"function {REWARD} in {', '.join(named)}",
            "it once: all would be the same sum",
            "Remove all but one, and add up their weights.",
        )
    if environment.name is None and named:
        yield UserError(
            "reward.function",
            REWARD,
            "another without environment.name: nothing gives such rewards",
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
