"""Rules on experts in an engine, according to the model's HF config.json. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.algorithm import PolicyGradientConfig
from hybridrl.config.rules_placement import num_experts
from hybridrl.config.schema import Config, RolloutConfig
from hybridrl.errors import UserError
from hybridrl.rollout.registry import ENGINES, offered_engines


def replay_rules(config: Config, shape: Mapping[str, Any]) -> Iterator[UserError]:
    if not replays(config):
        return
    key, engine = "algorithm.router_replay", config.rollout.engine
    off = f"{key}=off"
    if shape and not num_experts(shape):
        allowed = "off with a dense model, which has no experts"
        yield UserError(key, "rollout", allowed, f"Set {off}.")
    elif not ENGINES[engine].records_experts:
        able = [name for name in offered_engines() if ENGINES[name].records_experts]
        allowed = f"off with engine {engine!r}, which does not report which experts it chose"
        yield UserError(key, "rollout", allowed, f"Set rollout.engine={able[0]}, or {off}.")


def replays(config: Config) -> bool:
    """Whether the engine's choice of experts is recorded and replayed."""
    algorithm = config.algorithm
    return isinstance(algorithm, PolicyGradientConfig) and algorithm.router_replay == "rollout"


def rollout_expert_rules(rollout: RolloutConfig, shape: Mapping[str, Any]) -> Iterator[UserError]:
    experts = num_experts(shape)
    width = shape.get("moe_intermediate_size", shape.get("intermediate_size"))
    if rollout.ep == 1:
        if experts and isinstance(width, int) and width % rollout.tp:
            allowed = f"a divisor of the width {width} of the model's experts, with rollout.ep=1"
            remedy = (
                f"Change rollout.tp, or set rollout.ep={rollout.tp}, which keeps experts whole."
            )
            yield UserError("rollout.tp", rollout.tp, allowed, remedy)
        return
    remedy = "Set rollout.ep=1."
    if not ENGINES[rollout.engine].is_expert_parallel:
        yield UserError("rollout.ep", rollout.ep, f"1 with engine {rollout.engine!r}", remedy)
    elif shape and not experts:
        yield UserError("rollout.ep", rollout.ep, "1 with a dense model", remedy)
    elif rollout.ep != rollout.tp:
        allowed = f"1, or rollout.tp = {rollout.tp}, which keeps experts whole"
        yield UserError("rollout.ep", rollout.ep, allowed, remedy)
    elif experts % rollout.ep:
        allowed = f"a divisor of the model's {experts} experts"
        yield UserError("rollout.ep", rollout.ep, allowed, remedy)
