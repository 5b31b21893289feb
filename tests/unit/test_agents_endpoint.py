"""Agent programs against the endpoint: what training receives is exactly what was sampled."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator
from importlib.util import find_spec
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import pytest
from agent_programs import APIS, PROGRAMS
from agent_server import Served
from agent_templates import TOOL, tokenizer_of

from hybridrl.agents.backend import SamplingTerms
from hybridrl.agents.conversation import BadRequest
from hybridrl.agents.samples import Budgets, pick_last, pick_longest
from hybridrl.agents.token_form import TokenForm
from hybridrl.errors import UserError

pytestmark = pytest.mark.skipif(find_spec("openai") is None, reason="needs openai")
TESTS = Path(__file__).parents[1]
NUM_ROWS = {"tools": 2, "subagents": 2, "compaction": 2, "changed_tools": 2, "abort": 1}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as found:
        yield found


def post(served: Served, path: str, body: Any, token: str, **headers: str) -> tuple[int, Any]:
    """Returns status and body of an answer; `body` may be bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "x-api-key": token, **headers}
    request = urllib.request.Request(served.endpoint.url + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def check_program(served: Served, program: str, session: Any) -> None:
    """Checks the rows that a program leaves."""
    result = served.close(session)
    num_turns = sum(turn.is_delivered for turn in session.turns)
    assert len(result.rows) == (0 if program == "overflow" else NUM_ROWS.get(program, 1))
    counts = result.counts
    if program == "ten_turns":
        assert result.rows[0].num_turns == num_turns == 10
    if program == "malformed":
        assert counts["malformed_calls"] == 1
    if program == "retry":
        assert counts["replayed_requests"] >= 1 and num_turns == 2
        assert len(result.rows[0].spans) == 2
    if program in ("abort", "crash"):
        assert counts.get("aborted_turns", 0) <= 1
    if program == "subagents":
        assert {row.num_turns for row in result.rows} == {6}
    if program == "overflow":
        assert counts["refused_requests"] == 1


@pytest.mark.parametrize(
    ("api", "program"),
    [
        pytest.param(
            api, program, marks=[pytest.mark.full] * (api != "chat" and program != "tools")
        )
        for api in ("chat", "responses")
        for program in PROGRAMS
    ],
)
def test_programs_with_this_environments_sdk(served: Served, program: str, api: str) -> None:
    session = served.sessions.open(3, {"row": 1})
    PROGRAMS[program](APIS[api], served.endpoint.url, session.token)
    check_program(served, program, session)


@pytest.fixture(scope="session")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python with openai 2.x and anthropic: that of HYBRIDRL_AGENT_SDKS, or a new environment."""
    if found := os.environ.get("HYBRIDRL_AGENT_SDKS"):
        return found
    folder = tmp_path_factory.mktemp("sdks")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    command = [python, "-m", "pip", "install", "--quiet", "openai<3", "anthropic"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"pip cannot install the SDKs: {done.stderr[-200:]}")
    return python


@pytest.mark.full
@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_with_other_sdks(
    served: Served, other_python: str, program: str, api: str
) -> None:
    session = served.sessions.open(4)
    script = str(TESTS / "agent_programs.py")
    command = [other_python, script, program, api, served.endpoint.url, session.token]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == (program == "crash"), done.stderr
    check_program(served, program, session)


def test_a_turn_without_a_client_is_aborted_and_a_closed_session_aborts_its_turns() -> None:
    import openai

    with Served(grace_s=0.1) as served:
        session = served.sessions.open(0)
        PROGRAMS["abort"](APIS["chat"], served.endpoint.url, session.token)
        deadline = time.monotonic() + 5
        while not served.rank.aborted and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(served.rank.aborted) == 1
        client = openai.OpenAI(
            base_url=f"{served.endpoint.url}/v1", api_key=session.token, max_retries=0
        )
        asyncio.run(_close_while_asking(served, session, client))
        while len(served.rank.aborted) < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(served.rank.aborted) == 2
        assert served.queue.num_unfinished == 0


def test_a_request_that_arrives_after_its_session_ended_is_refused_and_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_found = threading.Event()
    with Served() as served:
        find = served.sessions.find

        def found(token: str | None) -> Any:
            session = find(token)
            is_found.set()
            return session

        monkeypatch.setattr(served.sessions, "find", found)
        session, body = served.sessions.open(0), json.dumps(chat("Hello")).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {session.token}\r\n"
        head += f"Host: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", served.endpoint.port), timeout=10) as client:
            client.sendall(head.encode())
            assert is_found.wait(10)
            served.close(session)
            client.sendall(body)
            assert b" 410 " in client.recv(1000)
        assert not served.endpoint._turns._known


def test_a_stream_without_a_client_is_aborted_and_closing_waits_for_no_turn() -> None:
    logged = queue.SimpleQueue[logging.LogRecord]()
    handler = QueueHandler(logged)
    logging.getLogger().addHandler(handler)
    with Served(grace_s=0.1, keep_alive_s=0.05) as served:
        session = served.sessions.open(0)
        headers = {"Authorization": f"Bearer {session.token}"}
        data = json.dumps(chat("endless", stream=True)).encode()
        url = f"{served.endpoint.url}/v1/chat/completions"
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            assert answer.read(5) == b": kee"
        deadline = time.monotonic() + 5
        while not served.rank.aborted and time.monotonic() < deadline:
            time.sleep(0.02)
        assert len(served.rank.aborted) == 1
        stream = urllib.request.urlopen(urllib.request.Request(url, data, headers))
        begin = time.monotonic()
        served.endpoint.close()
        assert time.monotonic() - begin < 5
        stream.close()
    logging.getLogger().removeHandler(handler)
    assert logged.empty()


async def _close_while_asking(served: Served, session: Any, client: Any) -> None:
    import openai

    asking = asyncio.to_thread(client.chat.completions.create, **chat("endless"))
    task = asyncio.create_task(asking)
    await asyncio.sleep(0.3)
    result = served.close(session)
    assert result.counts["aborted_turns"] >= 1 and len(result.rows) == 1
    with pytest.raises(openai.InternalServerError, match="session ended"):
        await task
    with pytest.raises(openai.APIStatusError, match="ended") as caught:
        await asyncio.to_thread(client.chat.completions.create, **chat("Hello"))
    assert caught.value.status_code == 410


def test_the_same_idempotency_key_gives_the_same_turn_within_a_session(served: Served) -> None:
    one, two = served.sessions.open(0), served.sessions.open(1)
    key = {"Idempotency-Key": "k"}
    first = post(served, "/v1/chat/completions", chat("Hello"), one.token, **key)[1]
    again = post(served, "/v1/chat/completions", chat("Hello"), one.token, **key)[1]
    other = post(served, "/v1/chat/completions", chat("Hello"), two.token, **key)[1]
    repeated = post(served, "/v1/chat/completions", chat("Hello"), one.token)[1]
    assert first == again
    assert len({found["id"] for found in (first, other, repeated)}) == 3
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert served.close(one).num_turns == 2
    assert served.close(two).num_turns == 1


def test_no_session_reads_another_and_wrong_tokens_are_refused(served: Served) -> None:
    one, two = served.sessions.open(0), served.sessions.open(1)
    first = post(served, "/v1/chat/completions", chat("Hello"), one.token)[1]
    message = first["choices"][0]["message"]
    history = [*chat("Hello")["messages"], message, {"role": "user", "content": "More"}]
    later = post(served, "/v1/chat/completions", {"messages": history}, two.token)[1]
    assert later["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert served.close(two).rows[0].num_turns == 1
    for token in ("", "x", one.token[:-1], one.session_id, two.token):
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens"):
            status, body = post(served, path, chat("Hello", max_tokens=9), token)
            assert status == (410 if token == two.token else 401)
            assert "error" in body
    served.close(one)


def test_foreign_hosts_large_bodies_and_bad_json_are_refused() -> None:
    with Served(max_body_bytes=5000) as served:
        token = served.sessions.open(0).token
        path = "/v1/chat/completions"
        for host in ("evil.example", "127.0.0.1.evil.example:80"):
            status, body = post(served, path, chat("Hello"), token, Host=host)
            assert status == 403 and "allowed: an IP address" in body["error"]["message"]
        for host in ("localhost:1", "127.0.0.1", "[::1]:80", "10.0.0.5"):
            assert post(served, path, chat("Hello"), token, Host=host)[0] == 200
        status, body = post(served, "/v1/messages", chat("a" * 6000), token)
        assert status == 413 and body["error"]["type"] == "request_too_large"
        for wrong in (b"{", b"[]", b"\xff", b'{"messages": NaN}'):
            assert post(served, path, wrong, token)[0] == 400
        compressed = {"Content-Encoding": "gzip"}
        status, body = post(served, path, b"not gzip", token, **compressed)
        assert status == 400 and "cannot be read" in body["error"]["message"]
        status, body = post(served, "/chat/completions", chat("Hello"), token)
        assert status == 404 and f"has {path}" in body["error"]["message"]
        with pytest.raises(UserError, match="free port"):
            Served(port=served.endpoint.port).__enter__()


REFUSED = [
    ("chat", {"n": 2}, "n"),
    ("chat", {"temperature": 0.2}, "temperature"),
    ("chat", {"top_p": 0.9}, "top_p"),
    ("chat", {"top_k": 5}, "top_k"),
    ("chat", {"logit_bias": {"5": 1}}, "logit_bias"),
    ("chat", {"presence_penalty": 0.5}, "presence_penalty"),
    ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0]"),
    ("chat", {"max_tokens": 0}, "max_tokens"),
    ("chat", {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs"),
    ("chat", {"stop": [""]}, "stop"),
    ("responses", {"previous_response_id": "r"}, "previous_response_id"),
    ("responses", {"text": {"format": {"type": "json_object"}}}, "text.format"),
    ("responses", {"input": [{"type": "computer_call"}]}, "input[0].type"),
    ("messages", {"temperature": 0.5}, "temperature"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice"),
    ("messages", {"messages": [{"role": "assistant", "content": "I"}]}, "messages"),
]
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


@pytest.mark.parametrize(("api", "change", "field"), REFUSED)
def test_what_training_cannot_allow_is_refused_by_name(
    served: Served, api: str, change: dict[str, Any], field: str
) -> None:
    session = served.sessions.open(0)
    body = chat("Hello", input="Hello", max_tokens=9) | change
    status, answer = post(served, PATHS[api], body, session.token)
    assert status == 400
    assert answer["error"]["message"].startswith(field)
    assert served.close(session).num_turns == 0


def test_values_without_effect_are_accepted_and_serving_allows_other_temperatures() -> None:
    fine = {"n": 1, "temperature": 1, "top_p": 1.0, "logit_bias": {}, "tool_choice": "auto"}
    path = "/v1/chat/completions"
    with Served(SamplingTerms(1.0, 500, may_differ=True, takes_stop_strings=False)) as served:
        session = served.sessions.open(0)
        assert post(served, path, chat("Hello", **fine), session.token)[0] == 200
        assert post(served, path, chat("Hi", temperature=0.2), session.token)[0] == 200
        assert [one.temperature for one, _ in served.rank.done.values()] == [None, 0.2]
        assert post(served, path, chat("Hi", temperature=3), session.token)[0] == 400
        assert post(served, path, chat("Hi", stop="x"), session.token)[0] == 400


def test_budgets_are_errors_that_sdks_do_not_retry(served: Served) -> None:
    import openai

    session = served.sessions.open(0, budgets=Budgets(max_turns=1))
    client = openai.OpenAI(base_url=f"{served.endpoint.url}/v1", api_key=session.token)
    client.chat.completions.create(**chat("Hello"))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**chat("Again"))
    assert caught.value.code == "turn_budget_exhausted"
    result = served.close(session)
    assert result.counts["refused_requests"] == 1


def test_answers_have_token_ids_and_log_probabilities_on_request(served: Served) -> None:
    session = served.sessions.open(0)
    body = chat("Hello", logprobs=True, return_token_ids=True)
    answer = post(served, "/v1/chat/completions", body, session.token)[1]
    (turn,) = session.turns
    assert answer["prompt_token_ids"] == list(turn.context)
    choice = answer["choices"][0]
    assert choice["token_ids"] == list(turn.completion.tokens)
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == list(turn.completion.logps)
    served.close(session)


def test_the_token_form_continues_its_own_tokens(served: Served) -> None:
    session, tokenizer = served.sessions.open(0), tokenizer_of("qwen3")
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer(text)["input_ids"]
    for number in range(2):
        body = {"token_ids": tokens, "sampling_params": {"max_tokens": 50, "logprobs": 1}}
        status, answer = post(served, "/inference/v1/generate", body, session.token)
        assert status == 200
        choice = answer["choices"][0]
        done = session.turns[number].completion
        assert choice["token_ids"] == list(done.tokens) and choice["finish_reason"] == "stop"
        content = choice["logprobs"]["content"]
        assert [one["token"] for one in content] == [f"token_id:{one}" for one in done.tokens]
        assert [one["logprob"] for one in content] == list(done.logps)
        more = "\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        tokens = [*tokens, *choice["token_ids"], *tokenizer(more)["input_ids"]]
    bad = {"token_ids": [10**9], "sampling_params": {}}
    assert post(served, "/inference/v1/generate", bad, session.token)[0] == 400
    (row,) = served.close(session).rows
    assert row.num_turns == 2


def test_the_token_form_takes_only_as_many_stop_tokens_as_the_engine() -> None:
    form, terms = TokenForm(200), SamplingTerms(1.0, 500, max_stop_tokens=2)
    body = {"token_ids": [9], "sampling_params": {"stop_token_ids": [5, 6, 5]}}
    assert form.asked(body, terms).stop_token_ids == (5, 6, 5)
    body = {"token_ids": [9], "sampling_params": {"stop_token_ids": [5, 6, 7]}}
    with pytest.raises(BadRequest, match="stop_token_ids: got .* at most 2 .*min_new_tokens"):
        form.asked(body, terms)


def test_a_model_without_a_chat_template_answers_token_ids_only() -> None:
    with Served(has_template=False) as served:
        session = served.sessions.open(0)
        for path in (*PATHS.values(), "/v1/messages/count_tokens"):
            body = chat("Hello", input="Hello", max_tokens=9)
            status, answer = post(served, path, body, session.token)
            assert status == 404 and "/inference/v1/generate" in answer["error"]["message"]
        tokens = tokenizer_of("qwen3")("<|im_start|>user\nHello<|im_end|>\n")["input_ids"]
        assert (
            post(served, "/inference/v1/generate", {"token_ids": tokens}, session.token)[0] == 200
        )
        assert len(served.close(session).rows) == 1


def test_tokens_are_counted_and_models_listed(served: Served) -> None:
    import openai

    session = served.sessions.open(0)
    body = {"messages": [{"role": "user", "content": "Hello"}], "system": "Be brief."}
    schema = TOOL["function"]["parameters"]
    body["tools"] = [{"name": "add", "description": "Adds.", "input_schema": schema}]
    num = post(served, "/v1/messages/count_tokens", body, session.token)[1]["input_tokens"]
    answer = post(served, "/v1/messages", {**body, "max_tokens": 99}, session.token)[1]
    usage = answer["usage"]
    assert num == usage["input_tokens"] == len(session.turns[0].context)
    client = openai.OpenAI(base_url=f"{served.endpoint.url}/v1", api_key=session.token)
    assert [model.id for model in client.models.list()] == ["policy"]
    with urllib.request.urlopen(f"{served.endpoint.url}/health", timeout=5) as health:
        assert json.loads(health.read())["status"] == "ok"
    served.close(session)


def test_streams_show_signs_of_life_and_report_errors_as_events(served: Served) -> None:
    session = served.sessions.open(0)
    data = json.dumps(chat("slow Hello", stream=True)).encode()
    headers = {"Authorization": f"Bearer {session.token}"}
    request = urllib.request.Request(f"{served.endpoint.url}/v1/chat/completions", data, headers)
    with urllib.request.urlopen(request, timeout=20) as answer:
        text = answer.read().decode()
    assert text.startswith(": keep-alive\n\n") and text.endswith("data: [DONE]\n\n")
    assert "Answer to slow Hello" in text
    served.close(session)


def test_pickers_choose_among_the_conversations_of_a_session(served: Served) -> None:
    for picker, num_turns in ((pick_last, 3), (pick_longest, 7)):
        session = served.sessions.open(0)
        PROGRAMS["compaction"](APIS["chat"], served.endpoint.url, session.token)
        (row,) = served.close(session, picker).rows
        assert row.num_turns == num_turns


@pytest.mark.parametrize("num", [100, pytest.param(1000, marks=pytest.mark.full)])
def test_many_sessions_are_open_at_once(served: Served, num: int) -> None:
    import aiohttp

    sessions = [served.sessions.open(number) for number in range(num)]

    async def ask(client: aiohttp.ClientSession, number: int) -> str:
        headers = {"Authorization": f"Bearer {sessions[number].token}"}
        body = chat(f"Question {number}")
        async with client.post("/v1/chat/completions", json=body, headers=headers) as answer:
            found = await answer.json()
            return str(found["choices"][0]["message"]["content"])

    async def ask_all() -> list[str]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(served.endpoint.url, connector=connector) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(num)))

    begin = time.monotonic()
    answers = asyncio.run(ask_all())
    print(f"{num} sessions: {time.monotonic() - begin:.1f} s")
    assert answers == [f"Answer to Question {number}" for number in range(num)]
    for number, session in enumerate(sessions):
        (row,) = served.close(session).rows
        assert row.messages[0]["content"] == f"Question {number}"
