"""Checks the section `agent` without a model. Does not import torch."""

from __future__ import annotations

from importlib.util import find_spec

from hybridrl.agents.command import Bubblewrap
from hybridrl.agents.own_environment import OwnEnvironment
from hybridrl.agents.samples import PICKERS, Picker
from hybridrl.config.agent import AgentConfig
from hybridrl.config.own_code import found_callable
from hybridrl.errors import MISSING, UserError


def check_agent(agent: AgentConfig) -> list[UserError]:
    """Returns the errors that need no model: a missing package, function or sandbox."""
    if not agent.is_on:
        return []
    found = check_package()
    for check in (_checked_function, find_picker, _checked_sandbox):
        try:
            check(agent)
        except UserError as error:
            found.append(error)
    return found


def check_package() -> list[UserError]:
    if find_spec("aiohttp") is not None:
        return []
    allowed = "an installed package, which the endpoint for agents needs"
    return [UserError("aiohttp", MISSING, allowed, "Run pip install 'hybridrl[agents]'.")]


def find_picker(agent: AgentConfig) -> Picker:
    """Returns the function for `agent.rows`. Raises UserError if it does not exist."""
    if agent.rows in PICKERS:
        return PICKERS[agent.rows]
    allowed = f"{', '.join(PICKERS)} or package.module:function"
    picker: Picker = found_callable(agent.rows, "agent.rows", allowed)
    return picker


def _checked_function(agent: AgentConfig) -> None:
    if agent.function is None:
        return
    if agent.python is None:
        found_callable(agent.function, "agent.function", "package.module:function")
        return
    environment = OwnEnvironment(agent.python)
    try:
        wrong = environment.check(agent.function)
    finally:
        environment.close()
    if wrong is not None:
        raise UserError("agent.function", agent.function, "package.module:function", wrong)


def _checked_sandbox(agent: AgentConfig) -> None:
    if agent.sandbox == "bubblewrap":
        Bubblewrap()
