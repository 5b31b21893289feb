"""Bodies that are not as an API wants them: refused with an error of the API, never a crash."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from agent_programs import png, uri
from agent_server import Served
from agent_templates import TOOL, images_of, tokenizer_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_agents_endpoint import post

from hybridrl.agents.anthropic_messages import Messages
from hybridrl.agents.asked import Asked, Dialect
from hybridrl.agents.backend import SamplingTerms
from hybridrl.agents.conversation import BadRequest, Conversation
from hybridrl.agents.openai_chat import ChatCompletions
from hybridrl.agents.openai_responses import Responses
from hybridrl.agents.sessions import Sessions
from hybridrl.agents.task_images import ImageReader
from hybridrl.agents.token_form import TokenForm

READS = images_of("qwen3-vl")
assert READS is not None
IMAGES = ImageReader(READS)
IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": uri(png(1)).split(",")[1]},
}
TERMS = SamplingTerms(temperature=1.0, max_context=4000)
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SCHEMA = TOOL["function"]["parameters"]
DIALECTS: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "chat": (
        ChatCompletions(IMAGES),
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "Hi"},
                        {"type": "image_url", "image_url": {"url": uri(png(1))}},
                    ],
                },
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "2"},
            ],
            "tools": [TOOL],
            "tool_choice": "auto",
            "stop": ["x"],
            "max_tokens": 5,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"enable_thinking": True},
            "logit_bias": {},
            "temperature": 1.0,
        },
    ),
    "responses": (
        Responses(IMAGES),
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "r", "text": "Hm"}]},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_image", "image_url": uri(png(1))}],
                },
            ],
            "instructions": "Be brief.",
            "tools": [{"type": "function", **TOOL["function"]}],
            "text": {"format": {"type": "text"}},
            "reasoning": {"effort": "low"},
        },
    ),
    "messages": (
        Messages(IMAGES),
        {
            "system": [{"type": "text", "text": "Be brief."}],
            "messages": [
                {"role": "user", "content": "Hi"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": "s"},
                        {"type": "text", "text": "I add."},
                        {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "c", "content": [IMAGE]},
                    ],
                },
            ],
            "tools": [{"name": "add", "input_schema": SCHEMA}],
            "tool_choice": {"type": "auto"},
            "max_tokens": 9,
        },
    ),
    "tokens": (
        TokenForm(200),
        {"token_ids": [1, 2], "sampling_params": {"max_tokens": 3, "stop_token_ids": [5]}},
    ),
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the paths of all values in a JSON value."""
    found = [path] if path else []
    if isinstance(value, (dict, list)):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            found += places(inner, (*path, key))
    return found


def replaced(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    body = copy.deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_wrong_value_anywhere_is_refused_or_harmless(name: str, data: st.DataObject) -> None:
    dialect, body = DIALECTS[name]
    path = data.draw(st.sampled_from(places(body)))
    wrong = replaced(body, path, data.draw(JUNK))
    try:
        asked = dialect.asked(json.loads(json.dumps(wrong)), TERMS)
    except BadRequest as error:
        assert error.status == 400 and dialect.error(error)
        return
    assert isinstance(asked, Asked)
    if asked.conversation is None:
        return
    asked.conversation.digests()
    session = SESSIONS.open(0)
    try:
        session.prepare(asked.conversation, asked.max_tokens)
    except BadRequest as error:
        assert error.status == 400


def _sessions() -> Sessions:
    from agent_templates import chat_template

    return Sessions(4000, chat_template("qwen3-vl"))


SESSIONS = _sessions()


def test_the_bodies_themselves_are_accepted() -> None:
    for dialect, body in DIALECTS.values():
        asked = dialect.asked(body, TERMS)
        if asked.conversation is not None:
            roles = [message["role"] for message in asked.conversation.messages]
            assert roles == ["system", "user", "assistant", "tool"]
            assert asked.conversation.messages[2]["tool_calls"][0]["id"] == "c"
            assert asked.conversation.tools[0]["function"]["name"] == "add"


def test_half_characters_have_digests() -> None:
    texts = ("\ud800", "\udfff")
    first, second = (Conversation(({"role": "user", "content": one},)).digests() for one in texts)
    assert first[0] == second[0] and first[1] != second[1]


def test_deep_nesting_and_half_characters_are_refused() -> None:
    with Served() as served:
        token, path = served.sessions.open(0).token, "/v1/chat/completions"
        deep = b'{"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"name": '
        deep += b'"f", "parameters": {"a": ' + b"[" * 900 + b"]" * 900 + b"}}}]}"
        half = rb'{"messages": [{"role": "user", "content": "\ud800"}]}'
        for body in (deep, b'{"messages": ' + b"[" * 10**5, half):
            status, answer = post(served, path, body, token)
            assert status == 400, answer
        assert len(tokenizer_of("qwen3")) > 200


def test_only_the_beginning_of_a_text_far_longer_than_the_context_is_tokenized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokenizing the output of a tool of 30 MB takes a minute, in which no other session of the
    replica would be served.
    """
    sessions = _sessions()
    template = sessions.template
    assert template is not None
    longest, plain = [0], template._encoder.plain

    def noted(texts: list[str]) -> list[list[int]]:
        longest.append(max(map(len, texts)))
        return plain(texts)

    monkeypatch.setattr(template._encoder, "plain", noted)
    monkeypatch.setattr(template._encoder, "continued", noted)
    huge = Conversation(({"role": "user", "content": "the rain " * 200_000},))
    many = Conversation(({"role": "user", "content": "a"},) * 5000)
    for conversation in (huge, many):
        session = sessions.open(0)
        with pytest.raises(BadRequest, match="at least") as caught:
            session.num_tokens(conversation)
        assert caught.value.code == "context_length_exceeded" and session.limit is None
        with pytest.raises(BadRequest, match="at least"):
            session.prepare(conversation)
        assert session.limit == "tokens" and max(longest) <= 8 * 4000
    # The beginning has few tokens, and many follow.
    template._tokenizer.add_tokens([" " * 100])
    late = " " * 40_000 + "the rain " * 200_000
    with pytest.raises(BadRequest, match="at least"):
        sessions.open(0).prepare(Conversation(({"role": "user", "content": late},)))
    assert max(longest) == 16 * 4000
    # Few tokens may have many characters.
    monkeypatch.setattr(template._encoder, "plain", lambda texts: [[5] * 50] * len(texts))
    assert len(sessions.open(0).prepare(huge).tokens) == 50


def test_token_ids_beyond_the_context_are_refused_for_their_number() -> None:
    with Served() as served:
        session = served.sessions.open(0)
        for tokens in ([1] * 9000, [1] * 8500 + ["x"]):
            body = {"token_ids": tokens, "sampling_params": {"max_tokens": 3}}
            status, answer = post(served, "/inference/v1/generate", body, session.token)
            assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert session.limit == "tokens"
        body = {"token_ids": [1, "x"], "sampling_params": {"max_tokens": 3}}
        status, answer = post(served, "/inference/v1/generate", body, session.token)
        assert status == 400 and answer["error"]["param"] == "token_ids"
