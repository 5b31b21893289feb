"""Advises for or against FP8 rollouts, by predicted step times. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from hybridrl.config.rules_quantization import quantization_rules
from hybridrl.config.schema import Config
from hybridrl.rollout.model_rules import quantized_model_rules
from hybridrl.rollout.registry import ENGINES
from hybridrl.services.planner.estimate import Estimate, estimate
from hybridrl.services.planner.hardware import Assumptions
from hybridrl.services.planner.phase_memory import RoleModel

KEY = "rollout.quantization"
PAYS = 0.95  # maximum ratio of step times at which FP8 is advised; it also changes samples


def quantization_note(
    config: Config,
    models: Sequence[RoleModel],
    world_size: int,
    assumed: Assumptions,
    found: Estimate,
) -> str | None:
    """Returns advice on `rollout.quantization`; None if it is the faster value or FP8 cannot be."""
    if config.algorithm.needs is not None and not config.algorithm.needs.rollouts:
        return None
    is_on = config.rollout.quantization == "fp8"
    if not ENGINES[config.rollout.engine].quantizes:
        return None
    other = config.with_values({KEY: "none" if is_on else "fp8"})
    family, shape = models[0].family, models[0].shape
    rules = [
        *quantization_rules(other, "bfloat16"),
        *quantized_model_rules(other.rollout, other.train, family, shape),
    ]
    if rules:
        return None
    changed = estimate(other, models, world_size, assumed)
    before, after = found.times.step, changed.times.step
    if is_on and after <= before:
        return (
            f"{KEY}=fp8 does not pay here: a step of {before:.1f} s would take {after:.1f} s "
            f"with {KEY}=none"
        )
    if not is_on and after < PAYS * before and changed.spare_bytes >= 0:
        return f"with {KEY}=fp8 a step would take {after:.1f} s instead of {before:.1f} s"
    return None
