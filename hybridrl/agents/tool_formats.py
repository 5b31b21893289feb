"""Formats in which models write tool calls and reasoning, one class per format. No torch.

A format takes the text of a turn apart. It never changes tokens: the text is what clients see, and
training uses the sampled tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hybridrl.config.files import parse_json
from hybridrl.environments.parsers import Hermes
from hybridrl.errors import MISSING, UserError, error_text

Schemas = Mapping[str, Mapping[str, Any]]
"""JSON schema of each tool's arguments, by name of the tool."""
_FIELDS = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PYTHON = {"True": True, "False": False, "None": None}  # as Qwen3.5's template writes them
_THINK, _THINK_END = "<think>", "</think>"


class MalformedCallError(Exception):
    """A tool call that cannot be read."""


@dataclass(frozen=True)
class Call:
    """A tool call. `call_id` is empty unless the model wrote an identifier."""

    name: str
    arguments: Mapping[str, Any]
    call_id: str = ""


@dataclass(frozen=True)
class Parts:
    """Parts of a turn's text.

    Args:
        malformed: Why a call cannot be read. If it is set, `calls` is empty and `content` has the
            text of all calls. None if every call is valid.
    """

    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    malformed: str | None = None


class ToolFormat(Protocol):
    """Reads tool calls."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts in a chat template that show that its model uses this format."""

    def split(self, text: str, schemas: Schemas) -> tuple[str, list[Call]]:
        """Returns the text outside of calls, and the calls. Raises MalformedCallError."""


class HermesCalls:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Qwen2.5, Qwen3 and Hermes."""

    marks = ("<tool_call>",)

    def split(self, text: str, schemas: Schemas) -> tuple[str, list[Call]]:
        found = Hermes().calls(text)
        for call in found:
            if call.error is not None:
                raise MalformedCallError(call.error)
        content, _ = _taken_out(text, "<tool_call>", "</tool_call>")
        return content, [Call(call.name, call.arguments) for call in found]


class FunctionTags:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`:
    Qwen3-Coder and Qwen3.5.
    """

    marks = ("<function=",)

    def split(self, text: str, schemas: Schemas) -> tuple[str, list[Call]]:
        content, bodies = _taken_out(text, "<tool_call>", "</tool_call>")
        return content, [self._call(body, schemas) for body in bodies]

    def _call(self, body: str, schemas: Schemas) -> Call:
        found = _FUNCTION.fullmatch(body)
        if found is None:
            raise MalformedCallError("<function=NAME> ... </function> is missing")
        name, inner = found[1].strip(), found[2]
        pairs = _PARAMETER.findall(inner)
        if inner.count("<parameter=") != len(pairs):
            raise MalformedCallError("</parameter> is missing")
        return Call(name, {k.strip(): _typed(name, k.strip(), v, schemas) for k, v in pairs})


class ArgumentTags:
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM-4.5+."""

    marks = ("<arg_key>",)

    def split(self, text: str, schemas: Schemas) -> tuple[str, list[Call]]:
        content, bodies = _taken_out(text, "<tool_call>", "</tool_call>")
        return content, [self._call(body, schemas) for body in bodies]

    def _call(self, body: str, schemas: Schemas) -> Call:
        name = body.partition("<arg_key>")[0].strip()
        pairs = _FIELDS.findall(body)
        if not name or "\n" in name or "<" in name:
            raise MalformedCallError("the name of the tool is missing")
        if len(pairs) != body.count("<arg_key>"):
            raise MalformedCallError("<arg_key> without <arg_value>")
        return Call(name, {k.strip(): _typed(name, k.strip(), v, schemas) for k, v in pairs})


class KimiSections:
    """`<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>{...}<|tool_call_end|>`
    within a section: Kimi K2. The identifiers must come back as the model wrote them.
    """

    marks = ("<|tool_calls_section_begin|>",)

    def split(self, text: str, schemas: Schemas) -> tuple[str, list[Call]]:
        sections = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
        content, bodies = _in_sections(text, sections, ("<|tool_call_begin|>", "<|tool_call_end|>"))
        return content, [self._call(body) for body in bodies]

    def _call(self, body: str) -> Call:
        call_id, found, arguments = body.partition("<|tool_call_argument_begin|>")
        call_id = call_id.strip()
        name = call_id.removeprefix("functions.").rpartition(":")[0]
        if not found or not name:
            raise MalformedCallError(f"{call_id[:80]!r} is not functions.NAME:INDEX with arguments")
        return Call(name, _object(arguments), call_id)


class DeepSeekSections:
    """`<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME` with JSON in a code block (V3 and R1), or
    `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}` (V3.1), within a section: DeepSeek.
    """

    marks = ("<｜tool▁calls▁begin｜>",)

    def split(self, text: str, schemas: Schemas) -> tuple[str, list[Call]]:
        sections = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
        calls = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
        content, bodies = _in_sections(text, sections, calls)
        return content, [self._call(body) for body in bodies]

    def _call(self, body: str) -> Call:
        first, found, rest = body.partition("<｜tool▁sep｜>")
        if not found:
            raise MalformedCallError("<｜tool▁sep｜> is missing")
        if first.strip() != "function" or "```" not in rest:
            return Call(_named(first), _object(rest))
        name, _, block = rest.partition("```json")
        return Call(_named(name), _object(block.strip().removesuffix("```")))


class LlamaJson:
    """One or several objects `{"name": ..., "parameters": {...}}`, separated by semicolons: Llama
    3.
    """

    marks = ("<|python_tag|>", "ipython")

    def split(self, text: str, schemas: Schemas) -> tuple[str, list[Call]]:
        rest = text.strip().removeprefix("<|python_tag|>").strip()
        if not re.match(r'\{\s*"(?:name|type|parameters|arguments)"', rest):
            return text, []
        calls = []
        while rest:
            try:
                found, end = json.JSONDecoder().raw_decode(rest)
            except ValueError as error:
                raise MalformedCallError(error_text(error)) from error
            arguments = found.get("parameters", found.get("arguments", {}))
            calls.append(Call(_named(found.get("name")), _object(arguments)))
            rest = rest[end:].lstrip("; \n")
        return "", calls


class Harmony:
    """Messages in channels, `<|channel|>commentary to=functions.NAME<|message|>{...}`: gpt-oss."""

    marks = ("<|channel|>",)

    def split(self, text: str, schemas: Schemas) -> tuple[str, list[Call]]:
        parts = self.parts(text)
        return parts.content, list(parts.calls)

    def parts(self, text: str) -> Parts:
        """Returns final text and preambles, the analysis and calls. Raises MalformedCallError."""
        content, reasoning, calls = [], [], []
        for header, body in self._messages(text):
            recipient = re.search(r"to=([^\s<]+)", header)
            channel = re.search(r"<\|channel\|>\s*(\w+)", header)
            if recipient is not None and recipient[1].startswith("functions."):
                calls.append(Call(recipient[1].removeprefix("functions."), _object(body)))
            elif channel is not None and channel[1] == "analysis":
                reasoning.append(body)
            else:
                content.append(body)
        return Parts("\n".join(content), "\n".join(reasoning), tuple(calls))

    def _messages(self, text: str) -> Iterator[tuple[str, str]]:
        for part in text.split("<|start|>assistant"):
            if not part.strip():
                continue
            header, found, body = part.partition("<|message|>")
            if not found:
                if "<|channel|>" in header or "to=functions." in header:
                    raise MalformedCallError("<|message|> is missing")
                header, body = "", part
            for end in ("<|end|>", "<|call|>", "<|return|>"):
                body = body.removesuffix(end)
            yield header, body


FORMATS: dict[str, ToolFormat] = {
    "harmony": Harmony(),
    "kimi_k2": KimiSections(),
    "deepseek": DeepSeekSections(),
    "glm45": ArgumentTags(),
    "qwen3_coder": FunctionTags(),
    "hermes": HermesCalls(),
    "llama3_json": LlamaJson(),
}
"""Formats by name. A template that shows marks of several formats uses the first of them."""


def format_of(template: str) -> ToolFormat | None:
    for found in FORMATS.values():
        if any(mark in template for mark in found.marks):
            return found
    return None


def named_format(name: str, template: str) -> ToolFormat | None:
    """Returns the format with a name, or for `auto` the template's. Raises UserError."""
    if name == "auto":
        return format_of(template)
    if name not in FORMATS:
        raise UserError(
            "agent.tool_format", name or MISSING, f"auto, {', '.join(FORMATS)}", "Correct the name."
        )
    return FORMATS[name]


@dataclass(frozen=True)
class TurnReader:
    """Splits texts of turns into parts; reads tool calls and `<think>` if the template has them."""

    tool_format: ToolFormat | None
    has_reasoning: bool = False

    @staticmethod
    def for_template(template: str, tool_format: str = "auto") -> TurnReader:
        return TurnReader(named_format(tool_format, template), _THINK_END in template)

    def parts(
        self, text: str, is_reasoning: bool, reads_calls: bool, schemas: Schemas | None = None
    ) -> Parts:
        """Returns the parts of a turn's text. A call that cannot be read leaves the text of all
        calls in the content.

        Args:
            is_reasoning: Whether the turn begins inside the reasoning.
        """
        if isinstance(self.tool_format, Harmony):
            try:
                found = self.tool_format.parts(text)
            except MalformedCallError as error:
                return Parts(text, malformed=str(error))
            return found if reads_calls or not found.calls else Parts(text, found.reasoning)
        reasoning, content = "", text
        if self.has_reasoning:
            reasoning, content = _split_reasoning(text, is_reasoning)
        if not reads_calls or self.tool_format is None:
            return Parts(content, reasoning)
        try:
            outside, calls = self.tool_format.split(content, schemas or {})
        except MalformedCallError as error:
            return Parts(content, reasoning, malformed=str(error))
        return Parts(outside.strip() if calls else content, reasoning, tuple(calls))


def _split_reasoning(text: str, is_reasoning: bool) -> tuple[str, str]:
    if not is_reasoning:
        if not text.lstrip().startswith(_THINK):
            return "", text
        text = text.lstrip().removeprefix(_THINK)
    reasoning, found, rest = text.partition(_THINK_END)
    return reasoning.strip("\n"), rest.lstrip("\n") if found else ""


def _taken_out(text: str, begin: str, end: str) -> tuple[str, list[str]]:
    first, *others = text.split(begin)
    outside, inside = [first], []
    for part in others:
        body, found, rest = part.partition(end)
        if not found:
            raise MalformedCallError(f"{end} is missing")
        inside.append(body)
        outside.append(rest)
    return "".join(outside), inside


def _in_sections(
    text: str, sections: tuple[str, str], calls: tuple[str, str]
) -> tuple[str, list[str]]:
    content, found = _taken_out(text, *sections)
    bodies = []
    for section in found:
        outside, inside = _taken_out(section, *calls)
        if outside.strip() or not inside:
            raise MalformedCallError(f"a section without {calls[0]}")
        bodies += inside
    return content, bodies


def _object(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments.strip() or "{}")
        except ValueError as error:
            raise MalformedCallError(f"the arguments are not JSON: {error_text(error)}") from error
    if not isinstance(arguments, dict):
        raise MalformedCallError("the arguments are not a JSON object")
    return arguments


def _named(name: Any) -> str:
    if not isinstance(name, str) or not name.strip():
        raise MalformedCallError("the name of the tool is missing")
    return name.strip()


def _typed(tool: str, key: str, value: str, schemas: Schemas) -> Any:
    """Returns an argument that was written as plain text, with its schema's type; without a schema,
    as JSON if it is a number, true, false, null, a list or an object.
    """
    properties = schemas.get(tool, {}).get("properties")
    schema = properties.get(key) if isinstance(properties, Mapping) else None
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string" or kind == ["string"]:
        return value
    try:
        found = parse_json(value)
    except ValueError:
        return value if kind is None else _PYTHON.get(value, value)
    return value if isinstance(found, str) and kind is None else found
