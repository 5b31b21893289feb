"""Messages of a conversation in one form for all APIs, and their digests. Does not import torch.

A message is a dictionary in the form of OpenAI's chat completions, with contents as text, reasoning
as `reasoning_content`, and arguments of tool calls as objects. A content with images is a list of
parts `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`, whose images are
`Content`. Two messages are the same if a client that received one could have sent the other back:
clients change identifiers, the order of JSON keys, white space around an answer and the form of
numbers. Images are the same if their files have the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridrl.agents.samples import Message
from hybridrl.config.files import parse_json
from hybridrl.contracts.prompts import Content
from hybridrl.environments.image_parts import IMAGE, TEXT

MessageContent = str | list[dict[str, Any]]
ASSISTANT, SYSTEM, USER, TOOL = "assistant", "system", "user", "tool"
ROLES = (SYSTEM, USER, ASSISTANT, TOOL)


class BadRequest(Exception):
    """A request that this endpoint refuses.

    Args:
        message: Text for the client, which names the field, its value and what is allowed.
        code: Machine-readable code.
    """

    def __init__(
        self, message: str, field: str | None = None, code: str | None = None, status: int = 400
    ) -> None:
        super().__init__(message)
        self.message, self.field, self.code, self.status = message, field, code, status


class ContextOverflow(BadRequest):
    """The messages leave no room for a turn.

    Args:
        num_tokens: Number of tokens in the messages; a lower bound if they were not tokenized to
            their end (`is_bound`).
        most: Maximum number of tokens in messages and turn.
    """

    def __init__(self, num_tokens: int, most: int, is_bound: bool = False) -> None:
        self.num_tokens, self.most = num_tokens, most
        found = f"at least {num_tokens}" if is_bound else f"{num_tokens}"
        super().__init__(
            f"This model's maximum context length is {most} tokens. However, your messages "
            f"resulted in {found} tokens. Please reduce the length of the messages.",
            "messages",
            "context_length_exceeded",
        )


@dataclass(frozen=True)
class Conversation:
    """What a chat template renders; tools are in OpenAI's form, arguments the client's."""

    messages: tuple[Message, ...]
    tools: tuple[Message, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def sharing(self, earlier: Conversation) -> Conversation:
        """Returns an equal conversation with an earlier one's objects, to save memory."""
        pairs = zip(self.messages, earlier.messages, strict=False)
        same = tuple(old if old == new else new for new, old in pairs)
        messages = same + self.messages[len(same) :]
        tools = earlier.tools if earlier.tools == self.tools else self.tools
        return Conversation(messages, tools, self.arguments)

    def digests(self) -> list[bytes]:
        """Returns digests of the first 0, 1, ... messages, with tools and arguments."""
        found = [_digest(b"", _json_text([self.tools, self.arguments]))]
        for message in self.messages:
            found.append(next_digest(found[-1], message))
        return found


def next_digest(digest: bytes, message: Message) -> bytes:
    content = message["content"]
    if message["role"] != ASSISTANT:
        texts = [message.get(name) for name in ("role", "tool_call_id", "name")]
        if isinstance(content, str):
            return _digest(digest, *texts, content)
        return _digest(digest, *texts, None, _json_text([_part_identity(one) for one in content]))
    calls = [_call_identity(call) for call in message.get("tool_calls", ())]
    text = _json_text(calls) if calls else None
    return _digest(digest, ASSISTANT, content.strip(), text)


def images_of(messages: Iterable[Message]) -> Iterator[Content]:
    """Yields the images in messages, in their order, not yet at their places among tokens."""
    for message in messages:
        if not isinstance(message["content"], str):
            yield from (part[IMAGE] for part in message["content"] if part["type"] == IMAGE)


def same_reasoning(kept: Message, received: Message) -> bool:
    """Whether a message came back with the same reasoning or, as from many clients, with none."""
    found = received.get("reasoning_content")
    return not found or found.strip() == kept.get("reasoning_content", "").strip()


def call_ids(message: Message) -> tuple[str, ...]:
    return tuple(call["id"] for call in message.get("tool_calls", ()))


def assistant(
    content: str, reasoning: str = "", calls: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": ASSISTANT, "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Returns a tool call. Arguments in JSON become an object; other text stays as it is."""
    if isinstance(arguments, str):
        try:
            parsed = parse_json(arguments or "{}")
            arguments = parsed if isinstance(parsed, dict) else arguments
        except ValueError:
            pass
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def body_digest(path: str, body: bytes) -> bytes:
    return hashlib.blake2b(path.encode() + b"\0" + body, digest_size=16).digest()


def _part_identity(part: Mapping[str, Any]) -> list[str]:
    return [part["type"], part[IMAGE].key if part["type"] == IMAGE else part[TEXT]]


def _call_identity(call: Mapping[str, Any]) -> list[Any]:
    function = call["function"]
    return [function["name"], function["arguments"]]


def _digest(before: bytes, *texts: str | None) -> bytes:
    """Returns the digest of texts after `before`; contains their lengths, to separate them."""
    whole = "".join("-" if text is None else f"{len(text)}:{text}" for text in texts)
    content = whole.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(before + content, digest_size=16).digest()


def _json_text(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, ensure_ascii=True, default=str)


def _plain(value: Any) -> Any:
    """Returns a JSON value with whole numbers as integers, as JavaScript writes them."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
