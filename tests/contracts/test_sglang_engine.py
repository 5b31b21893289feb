"""What the SGLang engine owes beyond the contract of all: its loop, its cache, no server."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from engine_cases import (
    MIXED,
    PACKAGED_ALL,
    close,
    close_engines,
    make_engine,
    make_reference,
    make_requests,
    start_packaged,
    write_weights,
)
from packaged import needs

from hybridrl.errors import UserError
from hybridrl.parallel.groups import start_process_group, stop_process_group
from hybridrl.platform import Platform
from hybridrl.rollout import sglang_scheduler, sglang_start
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.rollout.sglang_arguments import SPARE_TOKENS, server_arguments

pytestmark = list(needs("sglang"))

QWEN3 = "sglang-qwen3"
TOKEN_BYTES = 2 * 3 * 2 * 32 * 4  # keys and values, layers, heads, head, float32


@pytest.fixture(autouse=True)
def closed_engines() -> Iterator[None]:
    yield
    close_engines()


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    start_process_group(Platform.detect(), 60)
    yield
    stop_process_group()


class Event:
    """An event of a device whose work is done when it was asked for."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: True


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes engines schedule a batch before the tokens of the one before it are known, as they do
    on GPUs.
    """
    prepare = sglang_scheduler._Driven.prepare_turns

    def prepare_overlapped(scheduler: Any) -> None:
        prepare(scheduler)
        scheduler._is_overlapped = True
        scheduler.schedule_stream = torch.cpu.Stream()
        scheduler._war_barrier_enabled = False

    def arguments(*given: Any) -> dict[str, Any]:
        return {**server_arguments(*given), "disable_overlap_schedule": False}

    monkeypatch.setattr(sglang_start, "server_arguments", arguments)
    monkeypatch.setattr(sglang_scheduler._Driven, "prepare_turns", prepare_overlapped)
    monkeypatch.setattr(torch.cpu, "Event", Event, raising=False)
    for name in ("wait_stream", "wait_event"):
        monkeypatch.setattr(torch.cpu.Stream, name, lambda *args: None, raising=False)


def test_sglang_engine_generates_the_same_with_a_batch_under_way(
    request: pytest.FixtureRequest,
) -> None:
    requests = make_requests(25, MIXED)
    expected = generate(make_engine(QWEN3), requests)
    close_engines()
    request.getfixturevalue("overlapped")
    engine = make_engine(QWEN3)
    assert engine._scheduler.enable_overlap
    found = generate(engine, requests)
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))
    engine.submit(requests)
    for _ in range(6):
        engine.step()
    assert engine._scheduler.result_queue, "a batch is under way"
    begun = engine.collect()
    write_weights(engine, make_reference(QWEN3), 1)
    while engine.has_unfinished:
        engine.step()
    by_id = {one.request_id: one for one in [*begun, *engine.collect()]}
    assert all(close(by_id[one.request_id], one) for one in expected)
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    engine.clear()
    found = generate(engine, requests)
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))


def test_sglang_engine_keeps_what_prompts_share() -> None:
    engine = make_engine(QWEN3)
    prompt = tuple(2 + i % 20 for i in range(100))
    cached = []
    for number in range(2):
        engine.submit([Request(number, prompt, 5, SamplingParams(max_new_tokens=4))])
        engine.step()
        cached.append(engine._running[number].request.cached_tokens)
        while engine.has_unfinished:
            engine.step()
    assert cached[0] == 0 and cached[1] >= 99


def test_sglang_engine_takes_requests_back_where_the_cache_is_too_small() -> None:
    requests = [
        dataclasses.replace(request, sampling=SamplingParams(max_new_tokens=90))
        for request in make_requests(8, MIXED)
    ]
    expected = generate(make_engine(QWEN3), requests)
    engine = start_packaged(QWEN3, max_tokens=110, kv_cache_bytes=300 * TOKEN_BYTES)
    write_weights(engine, make_reference(QWEN3), 0)
    engine._scheduler.new_token_ratio = engine._scheduler.min_new_token_ratio = 0.01
    retracted = []
    update = engine._scheduler.update_running_batch

    def noted(batch: Any) -> Any:
        found = update(batch)
        retracted.append(len(engine._scheduler.waiting_queue))
        return found

    engine._scheduler.update_running_batch = noted
    found = generate(engine, requests)
    assert any(later > before for before, later in zip(retracted, retracted[1:], strict=False))
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize(("num_tokens", "allowed"), [(144, "at most 128"), (10, "less")])
def test_sglang_engine_refuses_a_cache_that_holds_no_longest_request(
    num_tokens: int, allowed: str
) -> None:
    assert SPARE_TOKENS == 16
    keys = r"data\.max_prompt_tokens \+ rollout\.max_new_tokens"
    with pytest.raises(UserError, match=f"{keys}: got 300 tokens; allowed: {allowed}.*Lower one"):
        start_packaged(QWEN3, kv_cache_bytes=num_tokens * TOKEN_BYTES)
    assert generate(make_engine(QWEN3), make_requests(2, MIXED))


def test_sglang_engine_has_no_threads_and_listens_nowhere() -> None:
    process = psutil.Process()

    def listening() -> set[Any]:
        found = process.net_connections(kind="all")
        return {one.laddr for one in found if one.status == psutil.CONN_LISTEN}

    make_engine(QWEN3)  # what the first start of the process leaves, e.g. pools of torch
    threads, sockets, children = set(threading.enumerate()), listening(), process.children()
    generate(make_engine(QWEN3), make_requests(6, MIXED))
    assert set(threading.enumerate()) == threads
    assert listening() == sockets and process.children() == children


def test_sglang_engine_refuses_experts_beside_dense_layers() -> None:
    config = {**PACKAGED_ALL["sglang-qwen3-moe"], "mlp_only_layers": [1]}
    with pytest.raises(UserError, match="layers without experts: got 1; allowed: none"):
        start_packaged("sglang-qwen3-moe", hf_config=config)


def test_sglang_engine_gives_memory_back_by_sglangs_own_calls() -> None:
    """On CPUs nothing is unmapped; that the calls are there, in order, and leave all as it was."""
    requests = make_requests(6, MIXED)
    engine = make_engine(QWEN3)
    expected = generate(engine, requests)
    engine.submit(requests)
    engine.step()
    engine.sleep()
    engine._memory("release", ["kv_cache", "weights"])
    engine._memory("resume", ["weights"])
    write_weights(engine, make_reference(QWEN3), 1)
    engine._scheduler.req_to_token_pool.req_to_token.fill_(10**6)  # as memory that is mapped anew
    engine._memory("resume", ["kv_cache"])
    assert not engine._scheduler.req_to_token_pool.req_to_token.any()
    engine.clear()
    found = generate(engine, requests)
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))
