"""Rules on configurations of models that read images. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.roles import reward_models
from hybridrl.config.schema import Config
from hybridrl.config.teacher import teacher_model
from hybridrl.config.wrapped_models import has_images
from hybridrl.errors import UserError
from hybridrl.rollout.registry import ENGINES

WITH_IMAGES = "with a model that reads images"


def image_rules(config: Config, hf_config: Mapping[str, Any]) -> Iterator[UserError]:
    """Yields what a run cannot do yet if the policy reads images, according to its config.json."""
    if not has_images(hf_config):
        return
    if importlib.util.find_spec("PIL") is None:
        remedy = "Run: pip install 'hybridrl[images]'."
        yield UserError("the package pillow", "not installed", f"installed, {WITH_IMAGES}", remedy)
    engine = config.rollout.engine
    if not ENGINES[engine].reads_images:
        able = " or ".join(name for name, traits in ENGINES.items() if traits.reads_images)
        allowed = f"{able} {WITH_IMAGES}"
        yield config.refused("rollout.engine", allowed, f"Set rollout.engine={able}.")
    needs = config.algorithm.needs
    if needs is not None and (needs.values or not needs.policy):
        allowed = f"an algorithm without a critic or reward model {WITH_IMAGES}"
        remedy = "Choose grpo, another algorithm with group baselines, or sft."
        yield config.refused("algorithm.name", allowed, remedy)
    if teacher_model(config) is not None:
        allowed = f"no teacher {WITH_IMAGES}"
        yield UserError("algorithm.teacher", "a teacher", allowed, "Choose another algorithm.")
    for name in reward_models(config):
        found = "a reward model, which reads text only"
        allowed = f"rewards that are functions {WITH_IMAGES}"
        yield UserError(f"reward {name}", found, allowed, "Choose another reward.")
