"""Checks the section `agent` without a model. Does not import torch."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

from hybridrl.agents.command import Bubblewrap
from hybridrl.agents.own_environment import OwnEnvironment
from hybridrl.agents.samples import PICKERS, Picker
from hybridrl.config.agent import AgentConfig
from hybridrl.config.own_code import check_options, found_callable
from hybridrl.errors import MISSING, UserError


def check_agent(agent: AgentConfig) -> list[UserError]:
    """Returns the errors that need no model: a missing package, program, function or sandbox."""
    if not agent.is_on:
        return []
    found = check_package()
    for check in (_checked_program, _checked_function, find_picker, _checked_sandbox):
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


def _checked_program(agent: AgentConfig) -> None:
    if agent.command is None or isinstance(agent.command, str):  # a shell finds programs in a text
        return
    program = agent.command[0]
    path = agent.env.get("PATH", os.environ.get("PATH", os.defpath))
    is_relative = os.path.dirname(program) != "" and not os.path.isabs(program)
    if is_relative or shutil.which(program, path=path) is None:
        allowed = "a program in PATH, or the absolute path of one"
        remedy = "Correct agent.command. Programs start in an empty folder of their own."
        raise UserError("agent.command", program, allowed, remedy)


def _checked_function(agent: AgentConfig) -> None:
    if agent.function is None:
        return
    if agent.python is None:
        found = found_callable(agent.function, "agent.function", "package.module:function")
        after = ", without the task"
        check_options(found, agent.function, "agent.function", agent.options, [None], after)
        return
    environment = OwnEnvironment(agent.python)
    if shutil.which(environment.python) is None:
        allowed = "the interpreter of a Python environment, such as envs/tools/bin/python"
        raise UserError("agent.python", agent.python, allowed, "Correct the path.")
    try:
        wrong = environment.check(agent.function)
    finally:
        environment.close()
    if wrong is not None:
        raise UserError("agent.function", agent.function, "package.module:function", wrong)


def _checked_sandbox(agent: AgentConfig) -> None:
    if agent.sandbox == "bubblewrap":
        Bubblewrap()
