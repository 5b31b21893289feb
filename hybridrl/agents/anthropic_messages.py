"""Requests and answers of Anthropic's API for messages. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.agents.asked import (
    LENGTH,
    STOP,
    TOOL_CALLS,
    Answer,
    Asked,
    check_sampling,
    content_of,
    event,
    joined,
    malformed,
    object_in,
    part_of,
    reads_calls,
    refused,
    stop_strings,
    template_arguments,
    text_of,
    tools_of,
    whole_number,
)
from hybridrl.agents.backend import SamplingTerms
from hybridrl.agents.conversation import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    BadRequest,
    ContextOverflow,
    Conversation,
    assistant,
    tool_call,
)
from hybridrl.agents.samples import Message
from hybridrl.agents.task_images import ImageReader

NOT_SUPPORTED = ("container", "mcp_servers", "output_format")
STOP_REASONS = {STOP: "end_turn", LENGTH: "max_tokens", TOOL_CALLS: "tool_use"}


class Messages:
    """`POST /v1/messages`. `images` reads images; None if the model reads only text."""

    def __init__(self, images: ImageReader | None = None) -> None:
        self._images = images

    keep_alive = event('{"type": "ping"}', "ping")

    def asked(self, body: Mapping[str, Any], terms: SamplingTerms) -> Asked:
        for name in NOT_SUPPORTED:
            if body.get(name):
                raise refused(name, body[name], "leave it out")
        form = object_in(body, "output_config").get("format")
        if form:
            raise refused("output_config.format", form, "leave it out")
        conversation = self.conversation(body)
        if conversation.messages[-1]["role"] == ASSISTANT:
            raise malformed(
                "messages", "an assistant message at the end", "a last message of the user"
            )
        return Asked(
            conversation=conversation,
            max_tokens=whole_number(body, "max_tokens"),
            stop_strings=stop_strings(body, "stop_sequences", terms),
            reads_calls=reads_calls(body, body.get("tool_choice")),
            streams=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            sampling=check_sampling(body, terms),
        )

    def conversation(self, body: Mapping[str, Any]) -> Conversation:
        messages: list[Message] = []
        if system := text_of(body.get("system"), "system"):
            messages.append({"role": SYSTEM, "content": system})
        messages += _messages(body.get("messages"), self._images)
        return Conversation(tuple(messages), tools_of(body.get("tools")), template_arguments(body))

    def answer(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        return {
            **_head(asked, answer),
            "content": list(_blocks(answer)),
            "stop_reason": _stop_reason(answer),
            "stop_sequence": answer.stop_string,
            "usage": _usage(answer, len(answer.tokens)),
        }

    def events(self, asked: Asked, answer: Answer) -> Iterator[str]:
        def sent(kind: str, **fields: Any) -> str:
            return event(json.dumps({"type": kind, **fields}), kind)

        head: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        head["usage"] = _usage(answer, 0)
        yield sent("message_start", message={**_head(asked, answer), **head})
        for index, block in enumerate(_blocks(answer)):
            opened, deltas = _streamed(block)
            yield sent("content_block_start", index=index, content_block=opened)
            for delta in deltas:
                yield sent("content_block_delta", index=index, delta=delta)
            yield sent("content_block_stop", index=index)
        delta = {"stop_reason": _stop_reason(answer), "stop_sequence": answer.stop_string}
        yield sent("message_delta", delta=delta, usage=_usage(answer, len(answer.tokens)))
        yield sent("message_stop")

    def error(self, error: BadRequest) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kinds |= {413: "request_too_large"}
        kind = kinds.get(error.status, "api_error" if error.status >= 500 else None)
        message = error.message
        if isinstance(error, ContextOverflow):
            message = f"prompt is too long: {error.num_tokens} tokens > {error.most} maximum"
        found = {"type": kind or "invalid_request_error", "message": message}
        return {"type": "error", "error": found}

    def error_event(self, error: BadRequest) -> str:
        return event(json.dumps(self.error(error)), "error")


def _messages(given: Any, images: ImageReader | None) -> Iterator[Message]:
    if not isinstance(given, list) or not given:
        raise malformed("messages", given, "a list with at least one message")
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        role = message.get("role") if isinstance(message, dict) else None
        if role not in (USER, ASSISTANT, SYSTEM):
            raise malformed(f"{where}.role", role, "user, assistant or system")
        content = message.get("content")
        if role == ASSISTANT:
            yield _turn(content, where)
        elif role == SYSTEM or isinstance(content, str):
            yield {"role": role, "content": text_of(content, f"{where}.content")}
        else:
            yield from _of_user(content, f"{where}.content", images)


def _of_user(blocks: Any, where: str, images: ImageReader | None) -> Iterator[Message]:
    if not isinstance(blocks, list):
        raise malformed(where, blocks, "a text, or a list of blocks")
    parts = []
    for place, block in enumerate(blocks):
        at = f"{where}[{place}]"
        if not isinstance(block, dict) or block.get("type") != "tool_result":
            parts.append(part_of(block, at, images))
            continue
        content = content_of(TOOL, block.get("content"), f"{at}.content", images)
        if block.get("is_error") and not content:
            content = "error"
        yield {"role": TOOL, "tool_call_id": str(block.get("tool_use_id")), "content": content}
    if parts:
        yield {"role": USER, "content": joined(parts, "\n")}


def _turn(content: Any, where: str) -> Message:
    if isinstance(content, str):
        return assistant(content)
    if not isinstance(content, list):
        raise malformed(f"{where}.content", content, "a text, or a list of blocks")
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(content):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind == "tool_use":
            arguments = object_in(block, "input")
            calls.append(tool_call(str(block.get("id")), str(block.get("name")), arguments))
        elif kind != "redacted_thinking":
            texts.append(text_of([block], f"{where}.content[{place}]"))
    return assistant("".join(texts), "\n".join(thoughts), calls)


def _blocks(answer: Answer) -> Iterator[dict[str, Any]]:
    if answer.reasoning:
        yield {"type": "thinking", "thinking": answer.reasoning, "signature": "none"}
    if answer.content or not answer.calls:
        yield {"type": "text", "text": answer.content}
    for call in answer.calls:
        function = call["function"]
        yield {
            "type": "tool_use",
            "id": call["id"],
            "name": function["name"],
            "input": function["arguments"],
        }


def _streamed(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": block["thinking"]},
            {"type": "signature_delta", "signature": block["signature"]},
        ]
        return {**block, "thinking": "", "signature": ""}, deltas
    if block["type"] == "text":
        return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    text = json.dumps(block["input"], ensure_ascii=False)
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": text}]


def _head(asked: Asked, answer: Answer) -> dict[str, Any]:
    return {
        "id": f"msg_{answer.number}",
        "type": "message",
        "role": ASSISTANT,
        "model": asked.model,
    }


def _stop_reason(answer: Answer) -> str:
    return "stop_sequence" if answer.stop_string else STOP_REASONS[answer.finish]


def _usage(answer: Answer, num_sampled: int) -> dict[str, Any]:
    return {
        "input_tokens": answer.num_prompt - answer.num_cached,
        "cache_read_input_tokens": answer.num_cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": num_sampled,
    }
