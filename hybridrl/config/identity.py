"""The identity of a run: knobs that must not change when it is restarted in its folder. No torch.

Owns their list, their comparison with the folder's `config.yaml`, and the choice of hub commits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config.agent import NOT_IDENTITY
from hybridrl.config.files import parse_json, replace_text
from hybridrl.config.hub import adopted, hub_names, resolved, with_names
from hybridrl.config.interpolation import digests, dotted, leaves, without_secrets
from hybridrl.config.lag import lag_identity
from hybridrl.config.load import load_config, to_yaml
from hybridrl.config.lora import LoraConfig
from hybridrl.config.schema import Config
from hybridrl.config.source import read_model_config
from hybridrl.config.wrapped_models import has_images
from hybridrl.errors import ConfigError, UserError

DIGESTS_FILE = "interpolated.json"
# Knobs that change how fast rewards are computed, but not their values.
_SPEED = {"workers", "timeout_s"}
_ABSENT = {"lora": LoraConfig().model_dump(mode="json")}  # of runs without the section
_HOW_FAST: Any = {
    **dict.fromkeys(_SPEED, True),
    "accuracy": True,  # affects reports only
    "functions": {"__all__": _SPEED},
}
# Knobs that only affect evaluations.
_EVALUATES = {"eval_prompts", "eval_limit", "validation"}
# Knobs that only training reads; not data.prompts, on which held-out rows depend.
_TRAINS = ("steps.", "mix.", "rollout.", "run.seed", "train.")
# `add_special_tokens` is not compared, because checkpoints identify prompts by their tokens. A run
# that was started before this knob existed has no value for it, and can continue only with false.
_IN_TOKENS = {"add_special_tokens"}


_OF_STEPS = {"prompts_per_step", "samples_per_prompt", "updates_per_step", "max_policy_lag"}


def run_folder(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name


def check_run_folder(config: Config, trains: bool = True) -> None:
    """Raises ConfigError if the run folder belongs to a run with another identity.

    `trains` says whether knobs that only training reads are compared too.
    """
    saved = saved_config(config)
    if saved is not None:
        # Older runs stored no commits; use the current ones for their names.
        saved = with_names(saved, adopted(saved, config))
        violations = identity_violations(identity(saved), config)
        if not trains:
            violations = [error for error in violations if not error.name.startswith(_TRAINS)]
        violations += _environment_violations(config)
        if violations:
            raise ConfigError(violations)


def saved_config(config: Config) -> Config | None:
    """Returns the configuration of the last training in the run folder; None if there was none."""
    file = run_folder(config) / "config.yaml"
    return load_config(file, like=config, is_saved=True) if file.exists() else None


def pinned(config: Config, *, asks_hub: bool = True) -> Config:
    """Returns a configuration in which every hub name has a commit.

    A name without a revision receives the commit stored in the run folder, or else the hub's
    current one; without `asks_hub` it stays unchanged. Only one process may call this (rank 0, or
    the process that starts the ranks), because a branch may move between two requests.
    """
    names = hub_names(config)
    if all(name.is_commit for name in names.values()):
        return config
    saved = saved_config(config)
    known = names if saved is None else adopted(config, saved)
    if asks_hub:
        saved_commits = {
            replace(names[place], rest=""): name.revision
            for place, name in known.items()
            if name != names[place]
        }
        known = resolved(known, saved_commits)
    return with_names(config, known)


def write_config(config: Config) -> None:
    """Writes `config.yaml` and digests of interpolated values into the run folder."""
    folder = run_folder(config)
    replace_text(folder / "config.yaml", to_yaml(config))
    known = digests(identity(config), config.written)
    if known:
        replace_text(folder / DIGESTS_FILE, json.dumps(known, indent=1) + "\n")


def _environment_violations(config: Config) -> list[UserError]:
    file = run_folder(config) / DIGESTS_FILE
    try:
        saved = parse_json(file.read_bytes()) if file.exists() else {}
    except (ValueError, OSError) as error:
        allowed = "the JSON object that hybridrl wrote"
        remedy = "Delete the file if no environment variable of the run has changed."
        return [UserError(str(file), error, allowed, remedy)]
    now, written = digests(identity(config), config.written), config.written
    texts = {dotted(place): text for place, text in written.items()}
    allowed = f"the value with which {run_folder(config)} was started"
    remedy = "Restore the environment variable, or choose another run.name."
    return [
        UserError(key, f"a changed value of {texts[key]}", allowed, remedy)
        for key, digest in now.items()
        if isinstance(saved, dict) and saved.get(key, digest) != digest
    ]


def changed_knobs(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Returns saved and current values of changed knobs, except `run` and steps.num_steps."""
    before, now = (leaves(section.model_dump(mode="json")) for section in (saved, config))
    return {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and not key.startswith("run.")
        and key != "steps.num_steps"
    }


def identity(config: Config) -> dict[str, Any]:
    """Returns the knobs that identify a run, without headers and options that may have API keys."""
    terms = {
        f"mix.{name}": term.model_dump(mode="json", exclude={"data": _IN_TOKENS})
        for name, term in config.mix.items()
    }
    known = {
        "model": config.model.model_dump(mode="json"),
        "algorithm": config.algorithm.model_dump(mode="json"),
        "data": config.data.model_dump(mode="json", exclude=_EVALUATES | _IN_TOKENS),
        "reward": config.reward.model_dump(mode="json", exclude=_HOW_FAST),
        "environment": config.environment.model_dump(mode="json", exclude=_SPEED),
        "agent": config.agent.model_dump(mode="json", exclude=NOT_IDENTITY),
        "steps": config.steps.model_dump(include=_OF_STEPS),
        "rollout": lag_identity(config),
        "run": {"seed": config.run.seed},
        "train": {"freeze": _frozen(config), "optimizer": config.train.optimizer},
    }
    if config.lora.is_on:  # absent from runs of earlier versions
        known["lora"] = config.lora.model_dump(mode="json")
    return {**without_secrets(known, config.written), **terms}


def _frozen(config: Config) -> list[str]:
    """Returns `train.freeze`, or its default for the model: a vision tower."""
    if config.train.freeze is not None:
        return list(config.train.freeze)
    try:
        return ["vision"] if has_images(read_model_config(config.model)) else []
    except UserError:  # reported when the model is read
        return []


def identity_violations(saved: Mapping[str, Any], config: Config) -> list[UserError]:
    found = []
    now = identity(config)
    for section in sorted(set(now) | set(saved)):
        absent = _ABSENT.get(section, {})
        before, after = dict(saved.get(section, absent)), now.get(section, absent)
        for key in sorted(set(before) | set(after)):
            if before.get(key) != after.get(key):
                remedy = "Restore this value, or choose another run.name."
                if (section, key) == ("algorithm", "correction"):
                    remedy += " Its default follows steps.max_policy_lag, rollout.quantization and"
                    remedy += " rollout.kv_cache_dtype: set algorithm.correction.weight to keep it."
                allowed = f"{before.get(key)!r}, with which {run_folder(config)} was started"
                found.append(UserError(f"{section}.{key}", repr(after.get(key)), allowed, remedy))
    return found
