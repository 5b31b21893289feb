"""How a model writes tool calls, and how it reads their results: one class a form. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridrl.config.files import parse_json
from hybridrl.environments.base import Observation
from hybridrl.errors import said


@dataclass(frozen=True)
class ToolCall:
    """A call that a turn asks for; with `error` it cannot be read, and that says why."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


class ToolParser(Protocol):
    """Reads calls from a turn's text, and gives their results the form of an observation."""

    def calls(self, text: str) -> Sequence[ToolCall]:
        """Returns the calls of a turn, in order; none where it is an answer."""
        ...

    def observation(self, results: Sequence[str]) -> Observation:
        """Returns what the policy is to read of the results, one a call."""
        ...


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen models write;
    results are messages of the role `tool`, which their chat templates know.
    """

    def calls(self, text: str) -> list[ToolCall]:
        """Returns the calls; one that is no JSON object, or not closed, has an error."""
        return [_json_call(body) for body in _between(text, "<tool_call>", "</tool_call>")]

    def observation(self, results: Sequence[str]) -> Observation:
        """Returns a message a result."""
        return [{"role": "tool", "content": result} for result in results]


class Tag:
    """One tool with one argument between two texts: `<calc>2*3</calc>`.

    Args:
        tool, argument: their names.
        open, close: around the argument.
        before, after: around the results.
    """

    def __init__(
        self,
        tool: str = "calculate",
        argument: str = "expression",
        open: str = "<calc>",
        close: str = "</calc>",
        before: str = "<result>",
        after: str = "</result>",
    ) -> None:
        self._tool, self._argument = tool, argument
        self._open, self._close, self._before, self._after = open, close, before, after

    def calls(self, text: str) -> list[ToolCall]:
        """Returns the calls; one that is not closed has an error."""
        return [
            ToolCall(self._tool, {self._argument: body})
            if body is not None
            else ToolCall(self._tool, error=f"{self._close} is missing")
            for body in _between(text, self._open, self._close)
        ]

    def observation(self, results: Sequence[str]) -> Observation:
        """Returns a text of all results."""
        return "".join(f"{self._before}{result}{self._after}" for result in results)


PARSERS: dict[str, type[ToolParser]] = {"hermes": Hermes, "tag": Tag}


def _between(text: str, start: str, end: str) -> list[str | None]:
    """Returns what stands between each start and its end; None for a start without one."""
    parts = re.split(re.escape(start), text)[1:]
    return [part.partition(end)[0] if end in part else None for part in parts]


def _json_call(body: str | None) -> ToolCall:
    if body is None:
        return ToolCall("", error="</tool_call> is missing")
    try:
        call = parse_json(body)
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):  # some models write them as JSON in a text
            arguments = parse_json(arguments)
    except (ValueError, AttributeError) as error:
        return ToolCall("", error=f"no JSON object with name and arguments: {said(error)}")
    name = call.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", error="no text under name, or no object under arguments")
    return ToolCall(name, arguments)
