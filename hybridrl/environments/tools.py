"""Environment that runs tools: Python functions that the policy calls in its turns. No torch.

A turn without a tool call is the final answer, which the section `reward` scores. The policy reads
its mistakes (a call that cannot be parsed, an unknown tool, or arguments that the tool rejects) as
results. The metric `environment/tool_errors` counts these mistakes, which are not failures of the
environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridrl.config.own_code import awaited, found_callable
from hybridrl.environments.base import Observation, Turn
from hybridrl.environments.parsers import PARSERS, ToolCall, ToolParser
from hybridrl.errors import error_text, failure_text

Tool = Callable[..., object]


class ToolEnvironment:
    """Runs the tools that a turn calls, and returns their results as an observation.

    Args:
        tools: Functions by the name that the policy uses, or a list of dotted paths
            `package.module:function`. Functions from a list keep their own names.
        parser: Name in PARSERS, dotted path `package.module:Class`, or parser object.
        max_characters: Maximum length of one result. A longer result is cut off and marked.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool] | Sequence[str],
        parser: str | ToolParser = "hermes",
        parser_options: Mapping[str, Any] | None = None,
        max_characters: int = 2000,
    ) -> None:
        if isinstance(tools, Mapping):
            self._tools = dict(tools)
        else:
            key, allowed = "environment.options.tools", "package.module:name"
            self._tools = {p.partition(":")[2]: found_callable(p, key, allowed) for p in tools}
        if isinstance(parser, str):
            allowed = f"{', '.join(PARSERS)} or package.module:name"
            own = PARSERS.get(parser) or found_callable(
                parser, "environment.options.parser", allowed
            )
            parser = own(**(parser_options or {}))
        self._parser: ToolParser = parser
        self._max_characters = max_characters

    def reset(self, prompt: str, columns: Mapping[str, object]) -> Observation:
        return None

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        """Runs the calls in the turn. A turn without calls ends the response."""
        calls = self._parser.calls(text)
        if not calls:
            return Turn(done=True)
        results, notes = [], []
        for call in calls:
            result, is_error = self._run(call)
            results.append(result)
            notes += ["tool_calls", *["tool_errors"] * is_error]
        return Turn(self._parser.observation(results), notes=notes)

    def _run(self, call: ToolCall) -> tuple[str, bool]:
        if call.error is not None:
            return f"error: {call.error}", True
        if call.name not in self._tools:
            return f"error: no tool {call.name!r}, only {', '.join(self._tools)}", True
        try:
            result = str(awaited(self._tools[call.name](**call.arguments)))
        except KeyboardInterrupt:
            raise
        except SystemExit as error:
            return f"error: it {failure_text(error)}", True
        except BaseException as error:  # the tool's code may raise anything
            return f"error: {error_text(error, self._max_characters)}", True
        if len(result) > self._max_characters:
            return result[: self._max_characters] + " (cut off)", False
        return result, False
