"""Rules between the section `agent` and other sections. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.agent import OWNERS, REWARD
from hybridrl.config.rules_experts import replays
from hybridrl.config.schema import Config
from hybridrl.errors import UserError


def agent_rules(config: Config) -> Iterator[UserError]:
    agent, needs = config.agent, config.algorithm.needs
    functions = [one.function for one in config.reward.scorers().values()]
    if functions.count(REWARD) > (1 if agent.is_on else 0):
        allowed = f"at most one scorer with this function, and only with agent.{OWNERS}"
        remedy = f"Set agent.{OWNERS}, or another reward.function."
        yield UserError("reward.function", REWARD, allowed, remedy)
    if not agent.is_on:
        return
    if config.environment.name is not None:
        allowed = "no value with the section agent, whose program runs its own tools"
        remedy = "Remove one of the sections environment and agent."
        yield config.refused("environment.name", allowed, remedy)
    if needs is not None and not needs.rollouts:
        allowed = f"no value with algorithm {config.algorithm.name}, which does not sample"
        remedy = "Remove the section agent, or use grpo."
        yield UserError("agent", agent.command or agent.function or "server", allowed, remedy)
    elif needs is not None and needs.feedback is not None:
        reason = "a pair consists of two sequences, and an agent's response may have several"
        allowed = f"an algorithm that compares advantages with the section agent, because {reason}"
        yield config.refused("algorithm.name", allowed, "Use grpo.")
    yield from _engine_rules(config)


def _engine_rules(config: Config) -> Iterator[UserError]:
    rollout = config.rollout
    if rollout.stop_strings:
        allowed = "no value with the section agent, whose turns end with an end token"
        remedy = "Remove rollout.stop_strings; the program may send `stop` with a request."
        yield UserError("rollout.stop_strings", list(rollout.stop_strings), allowed, remedy)
    if replays(config):
        reason = "the routed experts of conversations with several branches are not recorded"
        allowed = f"off with the section agent, because {reason}"
        remedy = "Set algorithm.router_replay=off."
        yield UserError("algorithm.router_replay", "rollout", allowed, remedy)
    if any(one.function == "reward_model" for one in config.reward.scorers().values()):
        reason = "a reward model scores one sequence, and an agent's response may have several"
        allowed = f"another function with the section agent, because {reason}"
        remedy = "Let the program report the reward, or set another reward.function."
        yield UserError("reward.function", "reward_model", allowed, remedy)
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    if config.agent.max_turn_tokens is not None and config.agent.max_turn_tokens > longest:
        allowed = f"at most data.max_prompt_tokens + rollout.max_new_tokens = {longest}"
        yield config.refused("agent.max_turn_tokens", allowed, "Lower agent.max_turn_tokens.")
