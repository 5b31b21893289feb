"""Agents over HTTP against a real engine, with an update of the weights in the middle.

The oracle is transformers: the log-probability of every trained token, given the tokens before it
in its row, under the weights of its version.
"""

from __future__ import annotations

import asyncio
import threading
from importlib.util import find_spec
from typing import Any

import engine_cases
import pytest
import torch
from agent_templates import end_ids, tokenizer_of
from engine_cases import LOGP_TOLERANCE, TINY, make_engine, make_reference, write_weights

from hybridrl.agents.backend import SamplingTerms, TurnQueue
from hybridrl.agents.chat_template import ChatTemplate
from hybridrl.agents.endpoint import Endpoint
from hybridrl.agents.samples import Budgets, Row
from hybridrl.agents.sessions import Session, Sessions
from hybridrl.rollout.engine import Request, SamplingParams, request_seed

pytestmark = [
    pytest.mark.usefixtures("process_group", "closed_engines"),
    pytest.mark.skipif(find_spec("openai") is None, reason="needs openai"),
]
NUM_SESSIONS, NUM_TURNS, NUM_NEW, UPDATE_AT = 5, 3, 24, 30


async def talk(url: str, session: Session) -> None:
    """Asks questions; before the last one, drops the first question and its answer."""
    import openai

    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=session.token)
    messages: list[Any] = []
    for turn in range(NUM_TURNS):
        question = f"Question {turn} of {session.sample_key}: the weather in Oslo?"
        messages.append({"role": "user", "content": question})
        if turn == NUM_TURNS - 1:
            del messages[:2]
        answer = await client.chat.completions.create(model="m", messages=messages)
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))


def answer_until(engine: Any, queue: TurnQueue, is_done: threading.Event, updated: Any) -> None:
    """Steps the engine as a rank does, and updates its weights once."""
    run = SamplingParams(stop_token_ids=end_ids("qwen3"))
    num_steps = 0
    while not is_done.is_set():
        if not engine.has_unfinished:
            queue.wait(0.02)
        for turn in queue.take().requests:
            sampling = SamplingParams(
                max_new_tokens=turn.max_new_tokens, stop_token_ids=run.stop_token_ids
            )
            seed = request_seed(7, 0, turn.sample_key, turn.turn)
            engine.submit([Request(turn.request_id, turn.tokens, seed, sampling)])
        if engine.has_unfinished:
            engine.step()
            num_steps += 1
        queue.finish(engine.collect())
        if num_steps == UPDATE_AT:
            write_weights(engine, updated, 1)
            num_steps += 1
    assert num_steps > UPDATE_AT


def check_logps(row: Row, models: list[Any]) -> set[int]:
    """Compares a row's log-probabilities with transformers. Returns the versions of the row."""
    whole, num_prompt = torch.tensor([row.prompt + row.tokens]), len(row.prompt)
    with torch.no_grad():
        logps = [
            model(whole)
            .logits[0, num_prompt - 1 : -1]
            .log_softmax(-1)
            .gather(1, torch.tensor(row.tokens)[:, None])[:, 0]
            for model in models
        ]
    versions = [version for version, count in row.versions for _ in range(count)]
    for place, version in enumerate(versions):
        if not row.observed[place]:
            assert abs(float(logps[version][place]) - row.logps[place]) < LOGP_TOLERANCE
    return set(versions)


def test_rows_of_a_real_engine_have_its_tokens_versions_and_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = tokenizer_of("qwen3")
    fields = {**TINY, "model_type": "qwen3", "vocab_size": len(tokenizer)}
    monkeypatch.setitem(engine_cases.ALL_MODELS, "agents", fields)
    engine, models = make_engine("agents"), [make_reference("agents", seed) for seed in (0, 1)]
    queue = TurnQueue(SamplingTerms(temperature=1.0, max_context=400))
    sessions = Sessions(400, ChatTemplate(tokenizer, end_ids("qwen3")))
    endpoint = Endpoint(sessions, queue, tokenizer, vocab_size=len(tokenizer)).start()
    opened = [
        sessions.open(number, budgets=Budgets(max_turn_tokens=NUM_NEW))
        for number in range(NUM_SESSIONS)
    ]
    is_done = threading.Event()

    async def talk_all() -> None:
        await asyncio.gather(*(talk(endpoint.url, session) for session in opened))

    failures: list[BaseException] = []

    def agents() -> None:
        try:
            asyncio.run(talk_all())
        except BaseException as error:  # raised below
            failures.append(error)
        finally:
            is_done.set()

    threading.Thread(target=agents, daemon=True).start()
    answer_until(engine, queue, is_done, models[1])
    endpoint.close()
    if failures:
        raise failures[0]
    found = set()
    for session in opened:
        sampled = sum(len(turn.completion.tokens) for turn in session.turns)
        result = sessions.close(session)
        # A turn that ended with a token other than the template's ends its row.
        assert len(result.rows) == 2 + result.counts.get("replaced_ends", 0)
        assert sum(row.num_trained for row in result.rows) == sampled
        for row in result.rows:
            found |= check_logps(row, models)
    assert found == {0, 1}
