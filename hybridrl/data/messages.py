"""Checks the messages of a chat, and converts them to the form that templates read. No torch.

Invariant: a returned chat is a list of dictionaries that contain `role` and `content`, a text or a
list of texts and images. Nulls at the top level of a message are removed; nulls inside arguments
and schemas are kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.config.files import has_utf8, parse_json, plain
from hybridrl.errors import BadRowError, DataError, error_text, short

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "ipython", "observation")
ASSISTANT = "assistant"
# Other names for these roles in ShareGPT, OpenAssistant and OpenAI's older interface.
_OTHER_NAMES = {
    "human": "user",
    "prompter": "user",
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bard": ASSISTANT,
    "bing": ASSISTANT,
    "model": ASSISTANT,
    "function": "tool",
    "function_response": "tool",
    "function-response": "tool",
}
_CALLS = (
    "function_call",
    "function-call",
    "tool_call",
)  # roles whose content is a list of calls
_IMAGES = ("image", "image_url", "input_image")  # types of content parts
_MEDIA = frozenset({"video", "video_url", "audio", "input_audio", "audio_url"})  # the same
_ALLOWED = 'messages {"role": "user", "content": "..."} or {"from": "human", "value": "..."}'


def chat(place: str, name: str, value: object) -> list[Message]:
    """Returns the messages in column `name` of a row. Raises BadRowError for other values."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        got = f"{plain(name)} = {short(value)}"
        raise BadRowError(place, got, f"a text, or {_ALLOWED}", "Fix that row.")
    return [_message(place, name, message) for message in value]


def tools_of(place: str, name: str, value: object) -> list[dict[str, Any]] | None:
    """Returns a column's tool schemas, a list or JSON text. Raises BadRowError for others."""
    if value is None or value in ("", []):
        return None
    found = _parsed(place, name, value) if isinstance(value, str) else value
    found = [found] if isinstance(found, Mapping) else found
    is_list = isinstance(found, Sequence) and not isinstance(found, str)
    if not is_list or not all(isinstance(schema, Mapping) and schema for schema in found):  # type: ignore[union-attr]
        allowed = 'schemas of tools, [{"type": "function", "function": {"name": "..."}}]'
        raise BadRowError(place, f"{plain(name)} = {short(value)}", allowed, "Fix that row.")
    schemas: list[dict[str, Any]] = [_copied(schema) for schema in found]  # type: ignore[union-attr]
    _check_texts(place, name, schemas)
    return schemas or None


def _message(place: str, name: str, given: object) -> Message:
    if not isinstance(given, Mapping):
        raise _refused(place, name, given)
    known: Message = {key: value for key, value in given.items() if value is not None}
    has_role = isinstance(known.get("role"), str)
    role = known.pop("role" if has_role else "from", None)
    if not isinstance(role, str):
        raise _refused(place, name, given)
    content = known.pop("content", None)
    if content is None and not has_role:
        content = known.pop("value", None)
    if role in _CALLS:
        role, content, known["tool_calls"] = ASSISTANT, None, content
    role = _OTHER_NAMES.get(role, role)
    if role not in ROLES:
        got = f"{plain(name)} has the role {short(role)}"
        raise BadRowError(place, got, ", ".join((*ROLES, *_OTHER_NAMES)), "Fix that row.")
    if known.get("weight", 1) != 1:
        got = f"{plain(name)} has a message of weight {short(known['weight'])}"
        raise BadRowError(place, got, "1, or no weight", "Remove weight; all turns count equally.")
    calls = known.pop("tool_calls", None) or known.pop("function_call", None)
    message: Message = {"role": role}
    if content is not None:
        message["content"] = _content(place, name, content, given)
    if calls:
        message["tool_calls"] = _calls(place, name, calls)
        message.setdefault("content", "")
    if "content" not in message:
        raise _refused(place, name, given)
    if role == ASSISTANT and not message["content"] and not calls:
        got = f"{plain(name)} has a message of the assistant without text"
        raise BadRowError(place, got, "a text that is not empty, or tool_calls", "Fix that row.")
    message |= {str(key): _copied(value) for key, value in known.items()}
    _check_texts(place, name, message)
    return message


def _refused(place: str, name: str, message: object) -> BadRowError:
    return BadRowError(place, f"{plain(name)} has {short(message)}", _ALLOWED, "Fix that row.")


def _content(place: str, name: str, content: object, message: object) -> str | list[dict[str, Any]]:
    """Returns the joined text of OpenAI's content parts; with images, a list of parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _refused(place, name, message)
    kinds = {str(part.get("type")) for part in content if isinstance(part, Mapping)}
    if found := sorted(kinds & _MEDIA):
        got = f"{plain(name)} has a part of type {found[0]}"
        remedy = "Remove such rows, or only these parts if the text does not need them."
        allowed = "texts and images, because videos and sounds are not supported"
        raise DataError(place, got, allowed, remedy)
    if kinds & set(_IMAGES):
        return [_part(place, name, part, message) for part in content]
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not texts or not all(isinstance(text, str) for text in texts):
        got = f"{plain(name)} has the content {short(content)}"
        raise BadRowError(place, got, "a text, or parts of type text", "Remove that row.")
    return "".join(map(str, texts))


def _part(place: str, name: str, part: object, message: object) -> dict[str, Any]:
    if isinstance(part, Mapping) and part.get("type") in _IMAGES:
        found = (part[key] for key in (*_IMAGES, "url", "path") if part.get(key) is not None)
        value = next(found, None)
        return {"type": "image"} if value is None else {"type": "image", "image": value}
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise BadRowError(
            place,
            f"{plain(name)} has the content {short(message)}",
            "parts of type text or image",
            "Remove that row.",
        )
    return {"type": "text", "text": text}


def _calls(place: str, name: str, value: object) -> list[dict[str, Any]]:
    """Converts tool calls to the form that templates read, in which arguments are an object."""
    value = _parsed(place, name, value) if isinstance(value, str) else value
    calls = [value] if isinstance(value, Mapping) else value
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _no_call(place, name, value)
    found = []
    for call in calls:
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise _no_call(place, name, call)
        arguments = inner.get("arguments", inner.get("parameters"))
        if isinstance(arguments, str):
            arguments = _parsed(place, name, arguments) if arguments.strip() else {}
        if not isinstance(arguments, Mapping | None):
            raise _no_call(place, name, call)
        function = {"name": inner["name"], "arguments": _copied(arguments or {})}
        more = {"id": call["id"]} if call.get("id") is not None else {}
        found.append({**more, "type": "function", "function": function})
    return found


def _no_call(place: str, name: str, call: object) -> BadRowError:
    allowed = 'tool calls {"function": {"name": "...", "arguments": {...}}}'
    return BadRowError(place, f"{plain(name)} has the call {short(call)}", allowed, "Fix that row.")


def _parsed(place: str, name: str, text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError as error:
        got = f"{plain(name)} has {short(text)} ({error_text(error)})"
        raise BadRowError(place, got, "JSON in that text", "Fix that row.") from error


def without_nulls(value: Any) -> Any:
    """Removes null entries from objects, because Arrow adds every key that occurs in any row."""
    if isinstance(value, Mapping):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return list(map(without_nulls, value))
    return value


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _copied(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_copied(part) for part in value]
    return value


def _check_texts(place: str, name: str, value: object) -> None:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            waiting += [*part, *part.values()]
        elif isinstance(part, list | tuple):
            waiting += part
        elif isinstance(part, str) and not has_utf8(part):
            got = f"{plain(name)} = {short(part)}, with half of a surrogate pair"
            raise BadRowError(place, got, "text that has UTF-8", "Fix that row.")
