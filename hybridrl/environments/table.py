"""Finds environments: by name in a table, or by importing a user's class. Does not import torch.

The class attribute `runs` determines where an environment runs: "process" (the default, for code
that may hang) or "here" (in the rank's own process).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from typing import Any

from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.own_code import check_options, found_callable
from hybridrl.environments.base import Environment
from hybridrl.environments.calculator import Calculator
from hybridrl.environments.tools import ToolEnvironment
from hybridrl.errors import UserError

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {
    "calculator": Calculator,
    "tools": ToolEnvironment,
}


def find_environment(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Returns a function that creates the environment. Raises UserError if it is unusable."""
    factory = _class_of(config)
    check_options(factory, str(config.name), "environment.name", config.options)
    return partial(factory, **config.options)


def check_environment(config: EnvironmentConfig) -> list[UserError]:
    """Returns the errors in the section `environment`; creates one that runs in the process."""
    if config.name is None:
        return []
    try:
        make = find_environment(config)
        if where(config) != "here":
            return []
        make()
    except UserError as error:
        return [error]
    return list(_unused_knobs(config))


def _unused_knobs(config: EnvironmentConfig) -> Iterator[UserError]:
    for knob in ("timeout_s", "workers"):
        value = getattr(config, knob)
        if value != EnvironmentConfig.model_fields[knob].get_default():
            yield UserError(
                f"environment.{knob}",
                value,
                f"not set with environment {config.name}, which runs in the rank's own process",
                f"Remove environment.{knob}, or set environment.isolated=true.",
            )


def observes_messages(config: EnvironmentConfig) -> bool:
    """Whether observations are messages, which need a template; unknown for a user's class."""
    return config.name in ENVIRONMENTS and config.options.get("parser", "hermes") == "hermes"


def where(config: EnvironmentConfig) -> str:
    if config.isolated is not None:
        return "process" if config.isolated else "here"
    return str(getattr(_class_of(config), "runs", "process"))  # optional in a user's class


def _class_of(config: EnvironmentConfig) -> Callable[..., Any]:
    name = config.name or ""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    allowed = f"{', '.join(ENVIRONMENTS)} or package.module:Class"
    if ":" not in name:
        near = get_close_matches(name, ENVIRONMENTS, 1)
        remedy = f"Did you mean {near[0]!r}?" if near else "Check the name."
        raise UserError("environment.name", name, allowed, remedy)
    return found_callable(name, "environment.name", allowed)
