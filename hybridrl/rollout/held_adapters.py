"""Rules for LoRA adapters in engines: which ones an engine holds next to the weights. No torch.

An engine holds all adapters, or all except those of experts, or none. It receives weights into
which the others are merged, so requests for other adapters need an engine that holds all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.schema import RolloutConfig
from hybridrl.errors import UserError
from hybridrl.models.adapters.rows import base_of, without_expert_adapters
from hybridrl.models.adapters.slots import slot_rules
from hybridrl.models.family import Family, ModelShape
from hybridrl.rollout.registry import ENGINES


def held_family(engine: str, family: Family, shape: ModelShape) -> Family:
    """Returns the policy's family with only the adapters that the engine holds."""
    if not any(_violations(engine, family, shape)):
        return family
    held = without_expert_adapters(family)
    return base_of(family) if any(_violations(engine, held, shape)) else held


def merging_notice(engine: str, family: Family, shape: ModelShape) -> str | None:
    """Returns a sentence that names the adapters merged for the engine, and why, if any."""
    reason = next(_violations(engine, family, shape), None)
    if reason is None:
        return None
    of_experts = " of experts" if held_family(engine, family, shape).lora is not None else ""
    return f"the engine generates with merged weights{of_experts} ({reason})"


def merged_transport_rules(
    rollout: RolloutConfig, family: Family, shape: ModelShape
) -> Iterator[UserError]:
    """Yields an error if ranks should read merged weights in each other's memory, where only the
    adapters and the weights without them are.
    """
    if rollout.transport != "peer":
        return
    for reason in _violations(rollout.engine, family, shape):
        allowed = f"auto or packed here, because the engine receives merged weights: {reason}"
        yield UserError("rollout.transport", "peer", allowed, "Set rollout.transport=auto.")


def _violations(engine: str, family: Family, shape: ModelShape) -> Iterator[str]:
    """Yields the reasons why an engine cannot hold all adapters of a family."""
    traits = ENGINES[engine]
    if family.lora is None:
        return
    if not traits.takes_adapters:
        yield f"the {engine} engine takes no adapters"
    elif traits.has_fused_parameters:
        for error in slot_rules(family, shape, traits.adapts_direct_latents):
            yield f"{error.name}: {error.allowed}"
