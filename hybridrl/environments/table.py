"""Environments by name, and how a user's own is found. No torch: a run is checked early.

A class says by `runs` where it is called: "process" (it may hang), the default, or "here".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from typing import Any

from hybridrl.config.environment import EnvironmentConfig
from hybridrl.environments.base import Environment
from hybridrl.environments.calculator import Calculator
from hybridrl.environments.tools import ToolEnvironment, find
from hybridrl.errors import UserError

ENVIRONMENTS: dict[str, Callable[..., Environment]] = {
    "calculator": Calculator,
    "tools": ToolEnvironment,
}


def find_environment(config: EnvironmentConfig) -> Callable[[], Environment]:
    """Returns what makes the environment that the section names.

    Raises:
        UserError: there is no such class, or it does not take these options.
    """
    made, options = _class_of(config), dict(config.options)
    try:
        inspect.signature(made).bind(**options)
    except TypeError as error:
        raise UserError(
            "environment.options",
            options,
            f"{inspect.signature(made)} with environment {config.name}",
            f"It says: {error}.",
        ) from error
    except ValueError:  # a class without a signature
        pass
    return partial(made, **options)


def check_environment(config: EnvironmentConfig) -> list[UserError]:
    """Returns what is wrong with the section, by making one; nothing where it names none."""
    if config.name is None:
        return []
    try:
        made = find_environment(config)
        if where(config) == "here":
            made()
    except UserError as error:
        return [error]
    return list(_unread(config)) if where(config) == "here" else []


def _unread(config: EnvironmentConfig) -> Iterator[UserError]:
    """Yields the knobs of processes that were set, for an environment that has none."""
    for knob in ("timeout_s", "workers"):
        value = getattr(config, knob)
        if value != EnvironmentConfig.model_fields[knob].get_default():
            yield UserError(
                f"environment.{knob}",
                value,
                f"nothing with environment {config.name}, which is called in place",
                "Remove it, or set environment.isolated=true.",
            )


def observes_messages(config: EnvironmentConfig) -> bool:
    """Whether what the section names shows results as messages, which a chat template has to take;
    of a user's own class it is not known.
    """
    return config.name in ENVIRONMENTS and config.options.get("parser", "hermes") == "hermes"


def where(config: EnvironmentConfig) -> str:
    """Returns where environments are called: "here" or "process"."""
    if config.isolated is not None:
        return "process" if config.isolated else "here"
    return str(getattr(_class_of(config), "runs", "process"))  # a user's class need not have it


def _class_of(config: EnvironmentConfig) -> Callable[..., Any]:
    name = config.name or ""
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name]
    near = get_close_matches(name, ENVIRONMENTS, 1)
    if ":" not in name:
        raise UserError(
            "environment.name",
            name,
            f"{', '.join(ENVIRONMENTS)} or package.module:Class",
            f"Did you mean {near[0]!r}?" if near else "Check the name.",
        )
    try:
        found: Callable[..., Any] = find(name, "name")
    except UserError as error:
        raise UserError("environment.name", name, error.allowed, error.remedy) from error
    return found
