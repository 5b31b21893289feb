"""Rules between the section `agent` and other sections. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.agent import OWNERS, REWARD
from hybridrl.config.rules_experts import replays
from hybridrl.config.schema import Config
from hybridrl.errors import UserError


def agent_rules(config: Config) -> Iterator[UserError]:
    """Yields the violations of rules between the section and other sections."""
    agent, needs = config.agent, config.algorithm.needs
    functions = [one.function for one in config.reward.scorers().values()]
    if functions.count(REWARD) > (1 if agent.is_on else 0):
        yield UserError(
            "reward.function",
            REWARD,
            f"at most one scorer with this function, and only with agent.{OWNERS}",
            f"Set agent.{OWNERS}, or another reward.function.",
        )
    if not agent.is_on:
        return
    if config.environment.name is not None:
        yield UserError(
            "environment.name",
            config.environment.name,
            "no value with the section agent, whose program runs its own tools",
            "Remove one of the sections environment and agent.",
        )
    if needs is not None and not needs.rollouts:
        yield UserError(
            "agent",
            agent.command or agent.function or "server",
            f"no value with algorithm {config.algorithm.name}, which does not sample",
            "Remove the section agent, or use grpo.",
        )
    elif needs is not None and needs.feedback is not None:
        yield UserError(
            "algorithm.name",
            config.algorithm.name,
            "an algorithm that compares advantages with the section agent, because a pair consists "
            "of two sequences, and an agent's response may consist of several",
            "Use grpo.",
        )
    yield from _engine_rules(config)


def _engine_rules(config: Config) -> Iterator[UserError]:
    rollout = config.rollout
    if rollout.stop_strings:
        yield UserError(
            "rollout.stop_strings",
            list(rollout.stop_strings),
            "no value with the section agent, whose turns end with an end token",
            "Remove rollout.stop_strings; the program may send `stop` with a request.",
        )
    if replays(config):
        yield UserError(
            "algorithm.router_replay",
            "rollout",
            "off with the section agent, because the routed experts of conversations with several "
            "branches are not recorded",
            "Set algorithm.router_replay=off.",
        )
    if any(one.function == "reward_model" for one in config.reward.scorers().values()):
        yield UserError(
            "reward.function",
            "reward_model",
            "another function with the section agent, because a reward model scores one sequence, "
            "and an agent's response may consist of several",
            "Let the program report the reward, or set another reward.function.",
        )
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    if config.agent.max_turn_tokens is not None and config.agent.max_turn_tokens > longest:
        yield UserError(
            "agent.max_turn_tokens",
            config.agent.max_turn_tokens,
            f"at most data.max_prompt_tokens + rollout.max_new_tokens = {longest}",
            "Lower agent.max_turn_tokens.",
        )
