"""The identity of a run: the knobs that a run folder may not change between starts. No torch.

Owns which knobs belong to it, the comparison with the `config.yaml` that a run folder keeps, and
which commits of the hub a run is of.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config.files import parse_json, replace_text
from hybridrl.config.hub import adopted, hub_names, resolved, with_names
from hybridrl.config.interpolation import digests, dotted, without_secrets
from hybridrl.config.lag import lag_identity
from hybridrl.config.load import load_config, to_yaml
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, UserError

DIGESTS_FILE = "interpolated.json"
# What says how rewards are computed, not which.
_SPEED = {"workers", "timeout_s"}
_HOW_FAST: Any = {
    **dict.fromkeys(_SPEED, True),
    "accuracy": True,  # is reported, and changes no weight
    "functions": {"__all__": _SPEED},
}


# What only evaluates changes no weight.
_EVALUATES = {"eval_prompts", "eval_limit", "validation"}
# What is not read where a model is only evaluated: how it learns, by what order and from which
# rows. Rows that are held out of those depend on data.prompts, so that it stays.
_TRAINS = ("steps.", "mix.", "rollout.", "run.seed", "train.")
# A checkpoint knows its prompts by their tokens. A run that began before the knob existed has no
# value of it, and needs false to go on.
_IN_TOKENS = {"add_special_tokens"}


def run_folder(config: Config) -> Path:
    """Returns the folder that everything of this run is written to."""
    return Path(config.run.dir) / config.run.name


def check_run_folder(config: Config, trains: bool = True) -> None:
    """Refuses to go on in a folder that a run of another identity has started.

    Args:
        config: of the run.
        trains: False leaves out the knobs that training alone reads.

    Raises:
        ConfigError: the folder's config.yaml differs in a knob of the identity, or cannot be read.
    """
    saved = saved_config(config)
    if saved is not None:
        # One of a run that was started when commits were not kept is that of now.
        saved = with_names(saved, adopted(saved, config))
        violations = identity_violations(identity(saved), config)
        if not trains:
            violations = [one for one in violations if not one.name.startswith(_TRAINS)]
        violations += _environment_violations(config)
        if violations:
            raise ConfigError(violations)


def saved_config(config: Config) -> Config | None:
    """Returns the configuration with which the run folder was last trained in, if it was.

    Raises:
        ConfigError: the folder's config.yaml cannot be read.
    """
    file = run_folder(config) / "config.yaml"
    return load_config(file, like=config) if file.exists() else None


def pinned(config: Config, *, asks_hub: bool = True) -> Config:
    """Returns a configuration with a commit in every hub name: one without a revision has that of
    the run folder, if there is one, others what the hub says now. In a run only rank 0 calls this,
    or the process that starts the ranks: branches may move between two questions.

    Args:
        config: of the run.
        asks_hub: False: names for which the run folder has no commit stay as they are.

    Raises:
        UserError: the hub has no such repository or revision, or cannot be reached while its cache
            has none; or the folder's config.yaml cannot be read.
    """
    names = hub_names(config)
    if all(name.is_commit for name in names.values()):
        return config
    saved = saved_config(config)
    known = names if saved is None else adopted(config, saved)
    if asks_hub:
        of_run = {
            replace(names[place], rest=""): name.revision
            for place, name in known.items()
            if name != names[place]
        }
        known = resolved(known, of_run)
    return with_names(config, known)


def write_config(config: Config) -> None:
    """Writes `config.yaml`, and of values that came from elsewhere digests by which a change shows,
    into the run folder.
    """
    folder = run_folder(config)
    replace_text(folder / "config.yaml", to_yaml(config))
    known = digests(identity(config), config.written)
    if known:
        replace_text(folder / DIGESTS_FILE, json.dumps(known, indent=1) + "\n")


def _environment_violations(config: Config) -> list[UserError]:
    """Returns a violation for each value of the identity that is written as before and came to
    something else.
    """
    file = run_folder(config) / DIGESTS_FILE
    try:
        saved = parse_json(file.read_bytes()) if file.exists() else {}
    except (ValueError, OSError) as error:
        allowed = "what hybridrl wrote there"
        return [UserError(str(file), error, allowed, "Delete it, if the values are as they were.")]
    now, written = digests(identity(config), config.written), config.written
    texts = {dotted(place): text for place, text in written.items()}
    return [
        UserError(
            key,
            f"{texts[key]}, which comes to another value now",
            f"the value with which {run_folder(config)} was started",
            "Set the environment variable back, or choose another run.name.",
        )
        for key, digest in now.items()
        if isinstance(saved, dict) and saved.get(key, digest) != digest
    ]


def changed_knobs(saved: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Returns the knobs that differ, by dotted name, with the saved and the present value; those of
    the section `run` and the number of steps are left out.
    """
    before, now = (_leaves(one.model_dump(mode="json")) for one in (saved, config))
    return {
        key: (before.get(key), now.get(key))
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key)
        and not key.startswith("run.")
        and key != "steps.num_steps"
    }


def _leaves(section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            found |= _leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def identity(config: Config) -> dict[str, Any]:
    """Returns what a run folder belongs to: model, algorithm, data, reward, environment, batch
    numbers, seed, frozen parts and further terms of the loss; without headers of requests and
    options that come from the environment, which may be keys.
    """
    steps = config.steps
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
        "steps": {
            "prompts_per_step": steps.prompts_per_step,
            "samples_per_prompt": steps.samples_per_prompt,
            "updates_per_step": steps.updates_per_step,
            "max_policy_lag": steps.max_policy_lag,
        },
        "rollout": lag_identity(config),
        "run": {"seed": config.run.seed},
        "train": {"freeze": list(config.train.freeze)},
    }
    return {**without_secrets(known, config.written), **terms}


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
