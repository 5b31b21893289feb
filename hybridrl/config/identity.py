"""The identity of a run: the knobs that a run folder may not change between starts. No torch.

Owns which knobs belong to it and the comparison with the `config.yaml` that a run folder keeps.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.load import load_config
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, UserError

# What says how rewards are computed, not which.
_SPEED = {"workers", "timeout_s"}
_HOW_FAST: Any = {**dict.fromkeys(_SPEED, True), "functions": {"__all__": _SPEED}}


# What only evaluates changes no weight.
_EVALUATES = {"eval_prompts", "eval_limit"}


def run_folder(config: Config) -> Path:
    """Returns the folder that everything of this run is written to."""
    return Path(config.run.dir) / config.run.name


def check_run_folder(config: Config) -> None:
    """Refuses to go on in a folder that a run of another identity has started.

    Raises:
        ConfigError: the folder's config.yaml differs in a knob of the identity, or cannot be read.
    """
    saved = run_folder(config) / "config.yaml"
    if saved.exists():
        violations = identity_violations(identity(load_config(saved)), config)
        if violations:
            raise ConfigError(violations)


def identity(config: Config) -> dict[str, Any]:
    """Returns what a run folder belongs to: model, algorithm, data, reward, environment, batch
    numbers, seed and further terms of the loss.
    """
    steps = config.steps
    terms = {f"mix.{name}": term.model_dump(mode="json") for name, term in config.mix.items()}
    return {
        "model": config.model.model_dump(mode="json"),
        "algorithm": config.algorithm.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json", exclude=_EVALUATES),
        "reward": config.reward.model_dump(mode="json", exclude=_HOW_FAST),
        "environment": config.environment.model_dump(mode="json", exclude=_SPEED),
        "steps": {
            "prompts_per_step": steps.prompts_per_step,
            "samples_per_prompt": steps.samples_per_prompt,
            "updates_per_step": steps.updates_per_step,
        },
        "run": {"seed": config.run.seed},
        **terms,
    }


def identity_hash(config: Config) -> str:
    """Returns a short stable hash of the identity."""
    text = json.dumps(identity(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def identity_violations(saved: Mapping[str, Any], config: Config) -> list[UserError]:
    """Returns a violation for each knob in which `config` differs from a saved identity."""
    found = []
    now = identity(config)
    for section in sorted(set(now) | set(saved)):
        before, after = dict(saved.get(section, {})), now.get(section, {})
        for key in sorted(set(before) | set(after)):
            if before.get(key) != after.get(key):
                found.append(
                    UserError(
                        f"{section}.{key}",
                        repr(after.get(key)),
                        f"{before.get(key)!r}, with which {run_folder(config)} was started",
                        "Set it back, or choose another run.name.",
                    )
                )
    return found
