"""OpenAI's API for responses, without state: each request has the whole input. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.agents.asked import (
    LENGTH,
    Answer,
    Asked,
    check_sampling,
    content_of,
    event,
    list_in,
    malformed,
    object_in,
    reads_calls,
    refused,
    template_arguments,
    text_of,
    tools_of,
    whole_number,
)
from hybridrl.agents.backend import SamplingTerms
from hybridrl.agents.conversation import (
    ASSISTANT,
    ROLES,
    SYSTEM,
    TOOL,
    USER,
    BadRequest,
    Conversation,
    assistant,
    tool_call,
)
from hybridrl.agents.openai_chat import OpenAiErrors
from hybridrl.agents.samples import Message
from hybridrl.agents.task_images import ImageReader

STATEFUL = ("previous_response_id", "conversation", "prompt", "background")
REASONING, CALL, RESULT = "reasoning", "function_call", "function_call_output"


class Responses(OpenAiErrors):
    """`POST /v1/responses`. `images` reads images; None if the model reads only text."""

    def __init__(self, images: ImageReader | None = None) -> None:
        self._images = images

    def asked(self, body: Mapping[str, Any], terms: SamplingTerms) -> Asked:
        for name in STATEFUL:
            if body.get(name):
                raise malformed(name, body[name], "no value; send the whole input instead")
        form = object_in(body, "text").get("format")
        if form not in (None, {"type": "text"}):
            raise refused("text.format", form, "{'type': 'text'}, or leave it out")
        messages = list(_messages(body.get("input"), self._images))
        if body.get("instructions"):
            text = text_of(body["instructions"], "instructions")
            messages.insert(0, {"role": SYSTEM, "content": text})
        effort = object_in(body, "reasoning").get("effort")
        return Asked(
            conversation=Conversation(
                tuple(messages), tools_of(body.get("tools")), template_arguments(body, effort)
            ),
            max_tokens=whole_number(body, "max_output_tokens"),
            reads_calls=reads_calls(body, body.get("tool_choice")),
            streams=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            sampling=check_sampling(body, terms),
        )

    def answer(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        return _response(asked, answer, list(_items(answer)))

    def events(self, asked: Asked, answer: Answer) -> Iterator[str]:
        num_sent = 0

        def sent(kind: str, **fields: Any) -> str:
            nonlocal num_sent
            num_sent += 1
            content = {"type": kind, "sequence_number": num_sent - 1, **fields}
            return event(json.dumps(content), kind)

        items = list(_items(answer))
        begun = _response(asked, answer, []) | {"status": "in_progress", "usage": None}
        begun["incomplete_details"] = None
        yield sent("response.created", response=begun)
        yield sent("response.in_progress", response=begun)
        for place, item in enumerate(items):
            where = {"output_index": place, "item_id": item["id"]}
            empty: dict[str, Any] = {
                "message": {"content": []},
                REASONING: {"content": [], "summary": []},
            }
            opened = item | {"status": "in_progress"} | empty.get(item["type"], {"arguments": ""})
            yield sent("response.output_item.added", output_index=place, item=opened)
            if item["type"] == CALL:
                text = item["arguments"]
                yield sent("response.function_call_arguments.delta", **where, delta=text)
                yield sent(
                    "response.function_call_arguments.done",
                    **where,
                    name=item["name"],
                    arguments=text,
                )
            else:
                (part,) = item["content"]
                kind = "output_text" if item["type"] == "message" else "reasoning_text"
                more: dict[str, Any] = {"logprobs": []} if kind == "output_text" else {}
                where["content_index"] = 0
                yield sent("response.content_part.added", **where, part={**part, "text": ""})
                yield sent(f"response.{kind}.delta", **where, delta=part["text"], **more)
                yield sent(f"response.{kind}.done", **where, text=part["text"], **more)
                yield sent("response.content_part.done", **where, part=part)
            yield sent("response.output_item.done", output_index=place, item=item)
        whole = _response(asked, answer, items)
        yield sent(f"response.{whole['status']}", response=whole)

    def error_event(self, error: BadRequest) -> str:
        content: dict[str, Any] = {"type": "error", "sequence_number": 0, "code": error.code}
        content |= {"param": error.field, "message": error.message}
        return event(json.dumps(content), "error")


def _messages(given: Any, images: ImageReader | None) -> Iterator[Message]:
    """Yields messages. Neighbouring reasoning, text and calls of the assistant are one message."""
    if isinstance(given, str):
        yield {"role": USER, "content": given}
        return
    if not isinstance(given, list) or not given:
        raise malformed("input", given, "a text, or a list with at least one item")
    turn: dict[str, Any] | None = None
    for place, item in enumerate(given):
        where = f"input[{place}]"
        if not isinstance(item, dict):
            raise malformed(where, item, "an object")
        kind = item.get("type") or "message"
        role = item.get("role")
        is_text = kind == "message" and role == ASSISTANT
        begins = kind == REASONING or (is_text and turn is not None and _has_text(turn))
        if turn is not None and (begins or not (is_text or kind == CALL)):
            yield turn
            turn = None
        if kind == REASONING:
            turn = assistant("", _reasoning(item, where))
        elif is_text:
            turn = turn or assistant("")
            turn["content"] = text_of(item.get("content"), f"{where}.content")
        elif kind == CALL:
            if not isinstance(item.get("name"), str):
                raise malformed(f"{where}.name", item.get("name"), "a text")
            turn = turn or assistant("")
            call_id = str(item.get("call_id") or "")
            arguments = text_of(item.get("arguments"), f"{where}.arguments")
            call = tool_call(call_id, item["name"], arguments)
            turn.setdefault("tool_calls", []).append(call)
        elif kind == RESULT:
            content = content_of(TOOL, item.get("output"), f"{where}.output", images)
            yield {"role": TOOL, "tool_call_id": str(item.get("call_id")), "content": content}
        elif kind == "message":
            role = SYSTEM if role == "developer" else role
            if role not in ROLES:
                raise malformed(f"{where}.role", role, ", ".join(ROLES))
            content = content_of(role, item.get("content"), f"{where}.content", images)
            yield {"role": role, "content": content}
        else:
            raise malformed(f"{where}.type", kind, f"message, {CALL}, {RESULT} or {REASONING}")
    if turn is not None:
        yield turn


def _has_text(turn: Mapping[str, Any]) -> bool:
    return bool(turn["content"] or turn.get("tool_calls"))


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    name = "content" if item.get("content") else "summary"
    parts = list_in(item, name, f"{where}.{name}")
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if not all(isinstance(text, str) for text in texts):
        raise malformed(f"{where}.content", parts, "parts with text")
    return "\n".join(str(text) for text in texts)


def _items(answer: Answer) -> Iterator[dict[str, Any]]:
    if answer.reasoning:
        part = {"type": "reasoning_text", "text": answer.reasoning}
        yield {
            "id": f"rs_{answer.number}",
            "type": REASONING,
            "summary": [],
            "content": [part],
            "status": "completed",
        }
    if answer.content or not answer.calls:
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        yield {
            "id": f"msg_{answer.number}",
            "type": "message",
            "role": ASSISTANT,
            "status": "completed",
            "content": [text],
        }
    for place, call in enumerate(answer.calls):
        yield {
            "id": f"fc_{answer.number}_{place}",
            "type": CALL,
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            "status": "completed",
        }


def _response(asked: Asked, answer: Answer, items: list[dict[str, Any]]) -> dict[str, Any]:
    assert asked.conversation is not None
    is_cut = answer.finish == LENGTH
    num_prompt, num_sampled = answer.num_prompt, len(answer.tokens)
    tools = [
        {"type": "function", "strict": None, **t["function"]} for t in asked.conversation.tools
    ]
    return {
        "id": f"resp_{answer.number}",
        "object": "response",
        "created_at": answer.created_s,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": asked.model,
        "output": items,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": tools,
        "usage": {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": answer.num_cached},
            "output_tokens": num_sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_prompt + num_sampled,
        },
    }
