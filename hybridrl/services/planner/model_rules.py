"""Rules on layouts that depend on the sizes of the policy, for searches. No torch.

loop/preflight.py checks them too, so a search must not propose what they refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.models.adapters.rows import base_of
from hybridrl.models.mixers import mixer_rules
from hybridrl.models.mtp import mtp_rules
from hybridrl.rollout.model_rules import quantized_model_rules
from hybridrl.services.planner.phase_memory import RoleModel


def model_rules(
    config: Config, policy: RoleModel, hf_config: Mapping[str, Any]
) -> Iterator[UserError]:
    """Yields why the policy, with its adapters, cannot have a layout that `rules.check` accepts."""
    train, family, shape = config.train, policy.family, policy.shape
    is_adapted = family.lora is not None
    yield from mixer_rules(shape.mixer, train.tp, train.cp, config.rollout.tp)
    yield from mtp_rules(train, policy.is_trained, is_adapted, family, shape, hf_config)
    yield from quantized_model_rules(config.rollout, train, base_of(family), shape)
