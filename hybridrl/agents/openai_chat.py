"""Requests and answers of OpenAI's API for chat completions. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.agents.asked import (
    Answer,
    Asked,
    check_sampling,
    content_of,
    event,
    list_in,
    malformed,
    object_in,
    reads_calls,
    stop_strings,
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
    BadRequest,
    Conversation,
    assistant,
    tool_call,
)
from hybridrl.agents.samples import Message
from hybridrl.agents.task_images import ImageReader


class OpenAiErrors:
    keep_alive = ": keep-alive\n\n"

    def error(self, error: BadRequest) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
        kind = kinds.get(error.status, "server_error" if error.status >= 500 else None)
        found = {"message": error.message, "type": kind or "invalid_request_error"}
        return {"error": found | {"param": error.field, "code": error.code}}

    def error_event(self, error: BadRequest) -> str:
        return event(json.dumps(self.error(error)))


class ChatCompletions(OpenAiErrors):
    """`POST /v1/chat/completions`. `images` reads images; None if the model reads only text."""

    def __init__(self, images: ImageReader | None = None) -> None:
        self._images = images

    def asked(self, body: Mapping[str, Any], terms: SamplingTerms) -> Asked:
        calls = reads_calls(body, body.get("tool_choice"))
        stream_options = object_in(body, "stream_options")
        return Asked(
            conversation=Conversation(
                tuple(_messages(body.get("messages"), self._images)),
                tools_of(body.get("tools")),
                template_arguments(body, body.get("reasoning_effort")),
            ),
            max_tokens=whole_number(body, "max_completion_tokens", "max_tokens"),
            stop_strings=stop_strings(body, "stop", terms),
            reads_calls=calls,
            streams=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            wants_logprobs=bool(body.get("logprobs")),
            wants_tokens=bool(body.get("return_token_ids")),
            wants_usage=bool(stream_options.get("include_usage")),
            sampling=check_sampling(body, terms),
        )

    def answer(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": ASSISTANT, "content": answer.content}
        if answer.reasoning:
            message |= {"reasoning_content": answer.reasoning, "reasoning": answer.reasoning}
        if answer.calls:
            message["content"] = answer.content or None
            message["tool_calls"] = [_call(call) for call in answer.calls]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": answer.finish,
            "logprobs": _logprobs(answer) if asked.wants_logprobs else None,
        }
        found = {**_head(asked, answer, "chat.completion"), "choices": [choice]}
        found["usage"] = _usage(answer)
        if asked.wants_tokens:
            choice["token_ids"] = list(answer.tokens)
            found["prompt_token_ids"] = list(answer.prompt)
        return found

    def events(self, asked: Asked, answer: Answer) -> Iterator[str]:
        head = _head(asked, answer, "chat.completion.chunk")
        if asked.wants_tokens:
            head["prompt_token_ids"] = list(answer.prompt)

        def chunk(delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
            return event(json.dumps({**head, "choices": [choice]}))

        logprobs = {"logprobs": _logprobs(answer)} if asked.wants_logprobs else {}
        tokens = {"token_ids": list(answer.tokens)} if asked.wants_tokens else {}
        yield chunk({"role": ASSISTANT, "content": ""})
        if answer.reasoning:
            yield chunk({"reasoning_content": answer.reasoning, "reasoning": answer.reasoning})
        if answer.content:
            yield chunk({"content": answer.content})
        for place, call in enumerate(answer.calls):
            yield chunk({"tool_calls": [{"index": place, **_call(call)}]})
        yield chunk({}, answer.finish, **logprobs, **tokens)
        if asked.wants_usage:
            yield event(json.dumps({**head, "choices": [], "usage": _usage(answer)}))
        yield event("[DONE]")


def _messages(given: Any, images: ImageReader | None) -> Iterator[Message]:
    if not isinstance(given, list) or not given:
        raise malformed("messages", given, "a list with at least one message")
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        if not isinstance(message, dict):
            raise malformed(where, message, "an object")
        role = message.get("role")
        role = SYSTEM if role == "developer" else role
        if role not in ROLES:
            raise malformed(f"{where}.role", role, ", ".join(ROLES))
        if role == ASSISTANT:
            text = text_of(message.get("content"), f"{where}.content")
            reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
            if not isinstance(reasoning, str):
                raise malformed(f"{where}.reasoning_content", reasoning, "a text")
            listed = list_in(message, "tool_calls", f"{where}.tool_calls")
            calls = [_read_call(call, where) for call in listed]
            yield assistant(text or str(message.get("refusal") or ""), reasoning, calls)
            continue
        content = content_of(role, message.get("content"), f"{where}.content", images)
        found: dict[str, Any] = {"role": role, "content": content}
        if role == TOOL:
            found["tool_call_id"] = str(message.get("tool_call_id") or "")
        if isinstance(message.get("name"), str):
            found["name"] = message["name"]
        yield found


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise malformed(f"{where}.tool_calls", call, "objects with a function and its name")
    arguments = function.get("arguments")
    if not isinstance(arguments, (str, dict, type(None))):
        raise malformed(f"{where}.tool_calls", arguments, "arguments as JSON text")
    return tool_call(str(call.get("id") or ""), function["name"], arguments or {})


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {"name": function["name"], "arguments": text}}


def _head(asked: Asked, answer: Answer, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{answer.number}",
        "object": kind,
        "created": answer.created_s,
        "model": asked.model,
    }


def _usage(answer: Answer) -> dict[str, Any]:
    num_prompt, num_sampled = answer.num_prompt, len(answer.tokens)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": answer.num_cached},
    }


def _logprobs(answer: Answer) -> dict[str, Any]:
    pairs = zip(answer.token_texts, answer.turn.completion.logps, strict=True)
    return {
        "content": [
            {
                "token": text,
                "logprob": logp,
                "bytes": list(text.encode("utf-8", errors="replace")),
                "top_logprobs": [],
            }
            for text, logp in pairs
        ],
        "refusal": None,
    }
