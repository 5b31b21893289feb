"""Requests and answers in one form for all APIs, and their sampling parameters. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from hybridrl.agents.backend import SamplingTerms
from hybridrl.agents.conversation import (
    TOOL,
    USER,
    BadRequest,
    Conversation,
    MessageContent,
)
from hybridrl.agents.forest import Turn
from hybridrl.agents.task_images import ImageReader
from hybridrl.contracts.prompts import Content
from hybridrl.environments.image_parts import IMAGE, TEXT, is_image
from hybridrl.errors import short
from hybridrl.models.vision.images import ImageFault

STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"
MAX_STOPS = 16
NOT_ALLOWED = "Training learns from the distribution that the run samples from."
# Values of parameters that change nothing. Any other value is refused.
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "use_beam_search": (False,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "logits_processors": ([],),
    "modalities": (["text"],),
    "echo": (False,),
    "prediction": (),
    "audio": (),
    "functions": (),
    "function_call": ("auto", "none"),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "documents": ([],),
}
_OF_RENDERING = frozenset(
    ("add_generation_prompt", "chat_template", "continue_final_message", "conversation")
    + ("documents", "messages", "padding", "return_dict", "return_tensors", "tokenize", "tools")
)


@dataclass(frozen=True)
class OwnSampling:
    """Sampling parameters of a client; None keeps the run's value."""

    temperature: float | None = None
    top_p: float | None = None


@dataclass(frozen=True)
class Asked:
    """A request for a turn.

    Args:
        conversation, tokens: Messages and tools, or the token ids that the client sent instead.
        stop_token_ids: Tokens that end the turn, in addition to the run's.
        wants_logprobs, wants_tokens, wants_usage: Whether the answer has log-probabilities, token
            ids, and a last event with the number of tokens.
    """

    conversation: Conversation | None = None
    tokens: tuple[int, ...] = ()
    max_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    sampling: OwnSampling = OwnSampling()
    reads_calls: bool = False
    streams: bool = False
    model: str = ""
    wants_logprobs: bool = False
    wants_tokens: bool = False
    wants_usage: bool = False


@dataclass(frozen=True)
class Answer:
    """A sampled turn for a client.

    Args:
        number: Name that is unique among answers, without the prefix of an API.
        created_s: Time at which the turn finished, in seconds since 1970.
        stop_string: Stop string that ended the turn, if any.
        token_texts: Text of each sampled token; empty unless log-probabilities are wanted.
    """

    number: str
    created_s: int
    turn: Turn
    content: str = ""
    reasoning: str = ""
    calls: tuple[Mapping[str, Any], ...] = ()
    finish: str = STOP
    stop_string: str | None = None
    token_texts: Sequence[str] = field(default=(), repr=False)

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.turn.completion.tokens

    @property
    def prompt(self) -> tuple[int, ...]:
        """Input of the model; not stored, because answers are kept for repeated requests."""
        return self.turn.tokens()[: self.num_prompt]

    @property
    def num_prompt(self) -> int:
        return self.turn.num_tokens - len(self.tokens)

    @property
    def num_cached(self) -> int:
        """Number of prompt tokens that earlier turns had in common."""
        return self.turn.num_shared


class Dialect(Protocol):
    """The form of an API's requests, answers and errors."""

    def asked(self, body: Mapping[str, Any], terms: SamplingTerms) -> Asked:
        """Returns the request for a turn. Raises BadRequest if it is malformed or not allowed."""

    def answer(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        """Returns the JSON body of an answer."""

    def events(self, asked: Asked, answer: Answer) -> Iterator[str]:
        """Yields the server-sent events of an answer."""

    def error(self, error: BadRequest) -> dict[str, Any]:
        """Returns the JSON body of an error."""

    def error_event(self, error: BadRequest) -> str:
        """Returns an error as a server-sent event."""

    keep_alive: str
    """Text to send while the client of a stream waits."""


def check_sampling(body: Mapping[str, Any], terms: SamplingTerms) -> OwnSampling:
    """Returns the sampling parameters that a request changes.

    Raises:
        BadRequest: A parameter, which the message names, would sample from another distribution
            than the run's, or is not supported.
    """
    for name, allowed in WITHOUT_EFFECT.items():
        value = body.get(name)
        if value is None or any(value == one for one in allowed):
            continue
        shown = " or ".join(short(one) for one in allowed)
        raise refused(name, value, f"{shown}, or leave it out" if shown else "leave it out")
    found: dict[str, float] = {}
    for name in ("temperature", "top_p", "top_k"):
        value, own = body.get(name), getattr(terms, name)
        if value is None or value == own or (name == "top_k" and own == 0 and value in (-1, 0)):
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise refused(name, value, "a number")
        if not terms.may_differ or name == "top_k":
            raise refused(name, value, f"{own:g}, the run's rollout.{name}, or leave it out")
        if name == "temperature" and not (value == 0 or terms.lowest_temperature <= value <= 2):
            raise refused(name, value, f"0, or {terms.lowest_temperature:g} to 2")
        if name == "top_p" and not 0 < value <= 1:
            raise refused(name, value, "above 0, at most 1")
        found[name] = float(value)
    return OwnSampling(**found)


def refused(name: str, value: Any, allowed: str) -> BadRequest:
    return BadRequest(
        f"{name}: got {short(value)}; allowed: {allowed}. {NOT_ALLOWED}", name, "not_allowed"
    )


def malformed(name: str, value: Any, allowed: str) -> BadRequest:
    return BadRequest(f"{name}: got {short(value)}; allowed: {allowed}.", name, "invalid_value")


def stop_strings(body: Mapping[str, Any], name: str, terms: SamplingTerms) -> tuple[str, ...]:
    value = body.get(name)
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or len(given) > MAX_STOPS:
        raise malformed(name, value, f"a text, or a list of at most {MAX_STOPS} texts")
    if not all(isinstance(one, str) and one for one in given):
        raise malformed(name, value, "texts that are not empty")
    if given and not terms.takes_stop_strings:
        raise refused(name, value, "leave it out, because the engine ends turns only at tokens")
    return tuple(given)


def object_in(body: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = body.get(name)
    if not isinstance(found, (dict, type(None))):
        raise malformed(name, found, "an object")
    return found or {}


def list_in(body: Mapping[str, Any], name: str, where: str = "") -> list[Any]:
    """Returns the list in a field, empty if not set; `where` names the field in messages."""
    found = body.get(name)
    if not isinstance(found, (list, type(None))):
        raise malformed(where or name, found, "a list")
    return found or []


def whole_number(body: Mapping[str, Any], *names: str) -> int | None:
    """Returns the first of several fields that is set; it must be a number of at least 1."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise malformed(name, value, "a whole number of at least 1")
        return value
    return None


def template_arguments(body: Mapping[str, Any], effort: Any = None) -> dict[str, Any]:
    found = object_in(body, "chat_template_kwargs")
    if wrong := _OF_RENDERING & found.keys():
        name = f"chat_template_kwargs.{min(wrong)}"
        raise malformed(name, found[min(wrong)], "arguments that the chat template itself reads")
    return found if effort is None else {"reasoning_effort": effort, **found}


def text_of(content: Any, where: str) -> str:
    """Returns the text of a content, a text or a list of parts. Raises BadRequest for others."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise malformed(where, content, "a text, or a list of parts")
    return "".join(_text(part, f"{where}[{place}]") for place, part in enumerate(content))


def content_of(role: str, content: Any, where: str, images: ImageReader | None) -> MessageContent:
    """Returns the content of a message of `role`; users and tools may send images.

    Raises:
        BadRequest: See `part_of`.
    """
    if role not in (USER, TOOL) or not isinstance(content, list):
        return text_of(content, where)
    return joined([part_of(part, f"{where}[{i}]", images) for i, part in enumerate(content)])


def part_of(part: Any, where: str, images: ImageReader | None) -> str | Content:
    """Returns the text or the image of a part.

    Raises:
        BadRequest: The part is neither, the model reads no images (`images` is None), or the image
            cannot be read.
    """
    if not is_image(part):
        return _text(part, where)
    if images is None:
        allowed = "parts of type text, because the model reads no images"
        raise malformed(where, part["type"], allowed)
    try:
        return images.read(part)
    except ImageFault as fault:
        message = f"{where}: got {fault.found}; allowed: {fault.allowed}."
        raise BadRequest(message, where, "invalid_image") from fault


def joined(parts: Iterable[str | Content], separator: str = "") -> MessageContent:
    """Returns the content of a message: a text, or parts if there is an image. Neighbouring texts
    become one, with `separator` between them.
    """
    found: list[dict[str, Any]] = []
    for is_text, group in groupby(parts, lambda part: isinstance(part, str)):
        if is_text:
            found.append({"type": TEXT, TEXT: separator.join(str(part) for part in group)})
        else:
            found += [{"type": IMAGE, IMAGE: part} for part in group]
    if any(part["type"] == IMAGE for part in found):
        return found
    return found[0][TEXT] if found else ""


def _text(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text", "refusal") and isinstance(text, str):
        return text
    allowed = "parts of type text"
    if is_image(part):
        allowed += "; images belong in messages of the user and in results of tools"
    raise malformed(where, kind, allowed)


def tools_of(given: Any) -> tuple[Mapping[str, Any], ...]:
    """Returns tools in OpenAI's form. Raises BadRequest if one is not a function."""
    found = list_in({"tools": given}, "tools")
    return tuple(_tool(tool, place) for place, tool in enumerate(found))


def _tool(tool: Any, place: int) -> dict[str, Any]:
    where = f"tools[{place}]"
    if not isinstance(tool, dict):
        raise malformed(where, tool, "an object")
    function = tool.get("function")
    inner: dict[str, Any] = function if isinstance(function, dict) else tool
    schema = inner.get("parameters", inner.get("input_schema"))
    kind = tool.get("type", "function")
    if kind not in ("function", "custom") or (kind == "custom" and "input_schema" not in inner):
        raise malformed(f"{where}.type", kind, "function, because the client must run the tool")
    if not isinstance(inner.get("name"), str):
        raise malformed(f"{where}.name", inner.get("name"), "a text")
    if not isinstance(schema, (dict, type(None))):
        raise malformed(f"{where}.parameters", schema, "an object")
    description = text_of(inner.get("description"), f"{where}.description")
    found = {"name": inner["name"], "description": description, "parameters": schema or {}}
    return {"type": "function", "function": found}


def reads_calls(body: Mapping[str, Any], choice: Any) -> bool:
    """Whether the model may call tools. Raises BadRequest if the request forces a call."""
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in (None, "auto", "none"):
        raise refused("tool_choice", choice, "auto or none")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        raise refused("tool_choice.disable_parallel_tool_use", True, "false")
    return bool(body.get("tools")) and kind != "none"


def event(data: str, name: str = "") -> str:
    return (f"event: {name}\n" if name else "") + f"data: {data}\n\n"
