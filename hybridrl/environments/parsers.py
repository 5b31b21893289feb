"""Parses tool calls; one class for the format of each kind of model. Does not import torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hybridrl.config.files import parse_json
from hybridrl.environments.base import Observation
from hybridrl.errors import error_text


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a turn. `error` explains why the call is malformed; None if it is valid."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


class ToolParser(Protocol):
    """Parses tool calls in the text of a turn, and formats their results."""

    def calls(self, text: str) -> Sequence[ToolCall]:
        """Returns the calls in a turn in order; empty if the turn is the final answer."""

    def observation(self, results: Sequence[str]) -> Observation:
        """Returns an observation that contains the results, one per call."""


class Hermes:
    """Parses `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, the format of Hermes and
    Qwen models. Results are messages with the role `tool`, which their chat templates accept.
    """

    def calls(self, text: str) -> list[ToolCall]:
        """Returns the calls; `error` is set for one that is not a JSON object or lacks its end."""
        return [_json_call(body) for body in _between(text, "<tool_call>", "</tool_call>")]

    def observation(self, results: Sequence[str]) -> Observation:
        return [{"role": "tool", "content": result} for result in results]


class Tag:
    """Parses calls to one tool with a single argument, written between two tags:
    `<calc>2*3</calc>`.

    `before` and `after` are the text around each result.
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
        return [
            ToolCall(self._tool, {self._argument: body})
            if body is not None
            else ToolCall(self._tool, error=f"{self._close} is missing")
            for body in _between(text, self._open, self._close)
        ]

    def observation(self, results: Sequence[str]) -> Observation:
        return "".join(f"{self._before}{result}{self._after}" for result in results)


PARSERS: dict[str, type[ToolParser]] = {"hermes": Hermes, "tag": Tag}


def _between(text: str, start: str, end: str) -> list[str | None]:
    parts = re.split(re.escape(start), text)[1:]
    return [part.partition(end)[0] if end in part else None for part in parts]


def _json_call(body: str | None) -> ToolCall:
    if body is None:
        return ToolCall("", error="</tool_call> is missing")
    try:
        call = parse_json(body)
        arguments = call.get("arguments", {})
        if isinstance(arguments, str):  # some models write the arguments as a JSON string
            arguments = parse_json(arguments)
    except (ValueError, AttributeError) as error:
        return ToolCall("", error=f"not a JSON object with name and arguments: {error_text(error)}")
    name = call.get("name")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", error="name must be a text and arguments an object")
    return ToolCall(name, arguments)
