"""Rules of `rollout.ep` and of cutting experts over an engine's ranks. No torch.

Knows a model only through its HF config.json; keys it lacks are not judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.engines import ENGINES
from hybridrl.config.rules_placement import num_experts
from hybridrl.config.schema import RolloutConfig
from hybridrl.errors import UserError


def rollout_expert_rules(rollout: RolloutConfig, shape: Mapping[str, Any]) -> Iterator[UserError]:
    """Returns what is wrong with how an engine holds experts.

    Args:
        rollout: the section.
        shape: the policy's config.json, or nothing.
    """
    experts = num_experts(shape)
    width = shape.get("moe_intermediate_size", shape.get("intermediate_size"))
    if rollout.ep == 1:
        if experts and isinstance(width, int) and width % rollout.tp:
            allowed = f"a divisor of the width {width} of the model's experts, with rollout.ep=1"
            remedy = f"Change rollout.tp, or set rollout.ep={rollout.tp}: whole experts by rank."
            yield UserError("rollout.tp", rollout.tp, allowed, remedy)
        return
    remedy = "Set rollout.ep=1."
    if not ENGINES[rollout.engine].is_expert_parallel:
        yield UserError("rollout.ep", rollout.ep, f"1 with engine {rollout.engine!r}", remedy)
    elif shape and not experts:
        yield UserError("rollout.ep", rollout.ep, "1 with a dense model", remedy)
    elif rollout.ep != rollout.tp:
        allowed = f"1, or rollout.tp = {rollout.tp}: whole experts on each rank of a replica"
        yield UserError("rollout.ep", rollout.ep, allowed, remedy)
    elif experts % rollout.ep:
        allowed = f"a divisor of the model's {experts} experts"
        yield UserError("rollout.ep", rollout.ep, allowed, remedy)
