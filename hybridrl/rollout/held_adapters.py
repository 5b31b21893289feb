"""Rules for LoRA adapters in engines. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.schema import RolloutConfig
from hybridrl.errors import UserError
from hybridrl.models.adapters.slots import slot_rules
from hybridrl.models.family import Family, ModelShape
from hybridrl.rollout.registry import ENGINES


def why_merged(engine: str, family: Family, shape: ModelShape) -> list[str]:
    """Returns the reasons why an engine cannot hold a model's adapters, and therefore receives
    weights with the adapters merged into them. Empty if it holds them.

    Args:
        engine: Name of the engine.
        family, shape: Family with adapters, and sizes of the model.
    """
    traits = ENGINES[engine]
    if not traits.takes_adapters:
        return [f"the {engine} engine takes no adapters"]
    if not traits.has_fused_parameters:
        return []
    rules = slot_rules(family, shape, traits.adapts_direct_latents)
    return [f"{error.name}: {error.allowed}" for error in rules]


def merged_transport_rules(
    rollout: RolloutConfig, family: Family, shape: ModelShape
) -> Iterator[UserError]:
    """Yields an error if ranks should read merged weights in each other's memory, where only the
    adapters and the weights without them are.

    Args:
        family, shape: Family with adapters, and sizes of the model.
    """
    if family.lora is None or rollout.transport != "peer":
        return
    for reason in why_merged(rollout.engine, family, shape):
        allowed = f"auto or packed here, because the engine receives merged weights: {reason}"
        yield UserError("rollout.transport", "peer", allowed, "Set rollout.transport=auto.")


def holds_adapters(engine: str, family: Family, shape: ModelShape) -> bool:
    """Whether an engine holds the adapters of a model; False if the model has none."""
    return family.lora is not None and not why_merged(engine, family, shape)
