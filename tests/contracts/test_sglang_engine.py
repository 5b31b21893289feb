"""What the SGLang engine owes beyond the contract of all: its loop, its cache, no server."""

from __future__ import annotations

import dataclasses
import inspect
import os
import threading
from array import array
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from engine_cases import (
    ALL_MODELS,
    LOGP_TOLERANCE,
    MIXED,
    PACKAGED_ALL,
    PENALIZED,
    Letters,
    close,
    close_engines,
    expected_logps,
    make_engine,
    make_reference,
    make_requests,
    penalized_logps,
    start_packaged,
    write_weights,
)
from packaged import needs
from tiny_models import longrope

from hybridrl.errors import ModelError, UserError
from hybridrl.models.families.by_length import at_length
from hybridrl.models.family import resolve_family
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import Completion, Request, SamplingParams, TokenTexts, generate
from hybridrl.rollout.sglang import routing as sglang_routing
from hybridrl.rollout.sglang import scheduler as sglang_scheduler
from hybridrl.rollout.sglang import start as sglang_start
from hybridrl.rollout.sglang.arguments import SPARE_TOKENS, server_arguments
from hybridrl.rollout.sglang.memory import EnginePools, SaverMemory, allocated_in
from hybridrl.rollout.sglang.sampling import request_sampling
from hybridrl.rollout.sglang.shared_prompts import SharedPrompts

pytestmark = [*needs("sglang"), pytest.mark.usefixtures("process_group", "closed_engines")]

QWEN3 = "sglang-qwen3"
EXPERTS = "sglang-qwen3-moe"
TOKEN_BYTES = 2 * 3 * 2 * 32 * 4  # keys and values, layers, heads, head, float32


@pytest.mark.parametrize("name", [QWEN3, EXPERTS])
def test_sglang_knows_the_arguments_of_gpus(name: str) -> None:
    """On CPU no engine is started with them."""
    make_engine(name)  # SGLang is imported then
    from sglang.srt.server_args import ServerArgs

    config = PACKAGED_ALL[name]
    family = resolve_family(None, config)
    settings = EngineSettings(config, family.architectures, "bfloat16", 8, 64)
    given = server_arguments(settings, family.shape(config), 2, 2**20, (2**36, 2**37))
    assert set(given) <= inspect.signature(ServerArgs).parameters.keys()


class Event:
    """An event of a device whose work is done when it was asked for."""

    def __getattr__(self, name: str) -> Callable[..., bool]:
        return lambda *args, **kwargs: True


@pytest.fixture
def overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes engines schedule a batch before the last one's tokens are known, as on GPUs."""
    prepare = sglang_scheduler._Driven.prepare_turns

    def prepare_overlapped(scheduler: Any) -> None:
        prepare(scheduler)
        scheduler.is_overlapped = True
        scheduler.schedule_stream = torch.cpu.Stream()
        scheduler._war_barrier_enabled = False

    def arguments(*given: Any) -> dict[str, Any]:
        return {**server_arguments(*given), "disable_overlap_schedule": False}

    monkeypatch.setattr(sglang_start, "server_arguments", arguments)
    monkeypatch.setattr(sglang_scheduler._Driven, "prepare_turns", prepare_overlapped)
    monkeypatch.setattr(torch.cpu, "Event", Event, raising=False)
    for name in ("wait_stream", "wait_event"):
        monkeypatch.setattr(torch.cpu.Stream, name, lambda *args: None, raising=False)


@pytest.mark.parametrize("kinds", [MIXED, PENALIZED])
def test_sglang_engine_generates_the_same_with_a_batch_under_way(
    kinds: list[SamplingParams], request: pytest.FixtureRequest
) -> None:
    requests = make_requests(25, kinds)
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


def test_sglang_engine_forgets_what_others_have_under_way(
    request: pytest.FixtureRequest,
) -> None:
    """Requests of nobody here, without log-probabilities, as of a benchmark of SGLang alone."""
    requests = make_requests(6, MIXED)
    request.getfixturevalue("overlapped")
    engine = make_engine(QWEN3)
    expected = generate(engine, requests)
    scheduler = engine._scheduler
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler import Scheduler

    asked = TokenizedGenerateReqInput(
        rid="another",
        input_text=None,
        input_ids=array("q", [3, 4, 5]),
        input_embeds=None,
        token_type_ids=None,
        mm_inputs=None,
        sampling_params=request_sampling(SamplingParams(max_new_tokens=9), 1, 0),
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    scheduler.process_batch_result = MethodType(Scheduler.process_batch_result, scheduler)
    scheduler.add(asked)
    for _ in range(4):
        scheduler.turn()
    assert scheduler.result_queue, "a batch is under way"
    del scheduler.process_batch_result
    scheduler.forget_requests()
    found = generate(engine, requests)
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))


def test_sglang_engine_keeps_what_older_weights_drew_of_requests_that_nobody_asked_for() -> None:
    engine = make_engine(QWEN3)
    engine.submit(make_requests(6, SamplingParams(max_new_tokens=12)))
    for _ in range(5):
        engine.step()
    write_weights(engine, make_reference(QWEN3), 3)
    while engine.has_unfinished:
        engine.step()
    assert [one.runs for one in engine.collect()] == [((0, 5), (3, 7))] * 6


@pytest.mark.parametrize("num_before", [0, 3])
def test_sglang_engine_refuses_a_non_finite_logp_as_soon_as_it_is_drawn(num_before: int) -> None:
    engine = make_engine(QWEN3)
    engine.submit(make_requests(3, SamplingParams(max_new_tokens=30)))
    for _ in range(num_before):
        engine.step()
    engine.tensors()["lm_head.weight"].fill_(float("nan"))
    with pytest.raises(UserError, match=r"log-probability nan for request 100"):
        engine.step()
    engine.clear()


def test_sglang_engine_begins_no_later_prompt_before_the_samples_of_earlier_ones() -> None:
    engine = make_engine(QWEN3, max_batch=4)
    engine._shared_prompts = SharedPrompts(1)
    prompts = [tuple(2 + (i + shift) % 20 for i in range(30)) for shift in range(3)]
    sampling = SamplingParams(max_new_tokens=6)
    asked = [Request(number, prompts[number // 4], number, sampling) for number in range(12)]
    engine.submit(asked)
    begun: list[int] = []
    while engine.has_unfinished:
        engine.step()
        begun += [number for number in engine._running if number not in begun]
    assert begun == list(range(12))
    assert len(engine.collect()) == 12


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


NOT_SHARED = SharedPrompts(1 << 30)


def samples(num_prompts: int, num: int) -> list[Request]:
    """Returns requests to prompts of 100 tokens, several to each, sampled in different ways."""
    prompts = [tuple(2 + i * (3 + one) % 20 for i in range(100)) for one in range(num_prompts)]
    each = [prompts[number // num] for number in range(num_prompts * num)]
    ways = [MIXED[number % len(MIXED)] for number in range(len(each))]
    return [Request(i, one, 7 + i, ways[i]) for i, one in enumerate(each)]


def counted(engine: Any) -> list[int]:
    """Returns how many tokens of prompts each pass computes, as they come."""
    scheduler, passes, run = engine._scheduler, list[int](), engine._scheduler.run_batch

    def run_batch(batch: Any, *rest: Any) -> Any:
        if batch.forward_mode.is_extend():
            passes.append(batch.extend_num_tokens)
        return run(batch, *rest)

    scheduler.run_batch = run_batch
    return passes


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("name", [QWEN3, EXPERTS])
def test_sglang_engine_computes_the_prompt_of_several_samples_once(
    request: pytest.FixtureRequest, name: str, is_overlapped: bool
) -> None:
    if is_overlapped:
        request.getfixturevalue("overlapped")
    requests, records = samples(3, 8), name == EXPERTS
    alone = make_engine(name, 32, records_experts=records)
    alone._shared_prompts, every = NOT_SHARED, counted(alone)
    expected = generate(alone, requests)
    assert sum(every) > 2300
    close_engines()
    engine = make_engine(name, 32, records_experts=records)
    passes = counted(engine)
    found = generate(engine, requests)
    assert passes == [pytest.approx(300, abs=9), pytest.approx(21, abs=9)]
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))
    scheduler = engine._scheduler
    kept = scheduler.token_to_kv_pool_allocator.available_size()
    assert kept + scheduler.tree_cache.evictable_size() == scheduler.max_total_num_tokens
    if records:
        assert all(
            np.array_equal(one.blobs["routed_experts"], two.blobs["routed_experts"])
            for one, two in zip(found, expected, strict=True)
        )


@pytest.mark.parametrize("num_steps", [1, 2, 3, 6])
def test_sglang_engine_goes_on_with_samples_that_waited_for_their_prompt(
    request: pytest.FixtureRequest, num_steps: int
) -> None:
    request.getfixturevalue("overlapped")
    requests = samples(3, 8)
    engine = make_engine(QWEN3)  # of which eight are computed at once
    engine._shared_prompts = NOT_SHARED
    expected = generate(engine, requests)
    engine._shared_prompts = SharedPrompts(90)  # one could take over 99 tokens
    engine._scheduler.forget_requests()
    engine.submit(requests)
    for _ in range(num_steps):
        engine.step()
    done = engine.collect()
    assert len(engine.pending()) + len(done) == len(requests)
    write_weights(engine, make_reference(QWEN3), 1)
    while engine.has_unfinished:
        engine.step()
    by_id = {one.request_id: one for one in [*done, *engine.collect()]}
    assert all(close(by_id[one.request_id], one) for one in expected)
    engine.submit(requests)
    engine.step()
    engine.clear()
    passes = counted(engine)
    found = generate(engine, requests)
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))
    assert sum(passes) < 600  # each of three prompts once or twice, not by each sample: 2400


def test_sglang_engine_keeps_what_the_samples_of_a_prompt_said() -> None:
    """Though it does not look up the last token of their prompt: a next turn begins with it."""
    engine = make_engine(QWEN3, 32)
    requests = [
        dataclasses.replace(one, sampling=SamplingParams(max_new_tokens=8)) for one in samples(2, 8)
    ]
    turns = [
        Request(100 + done.request_id, one.prompt + done.tokens + (5,), 3, one.sampling)
        for one, done in zip(requests, generate(engine, requests), strict=True)
    ]
    passes = counted(engine)
    generate(engine, turns)
    assert sum(passes) == 2 * len(turns)  # the last token that was drawn, and the new one


def short_of_room(
    name: str, token_bytes: int, records_experts: bool = False
) -> tuple[Any, list[int]]:
    """Returns an engine whose cache is short of room, and how many requests wait by step."""
    room = {"max_tokens": 110, "kv_cache_bytes": 300 * token_bytes}
    engine = start_packaged(name, **room, records_experts=records_experts)
    write_weights(engine, make_reference(name), 0)
    scheduler, waiting = engine._scheduler, []
    if hasattr(scheduler, "new_token_ratio_tracker"):  # of newer versions
        scheduler.new_token_ratio_tracker.current = scheduler.new_token_ratio_tracker.min = 0.01
    else:
        scheduler.new_token_ratio = scheduler.min_new_token_ratio = 0.01
    update = scheduler.update_running_batch

    def noted(batch: Any) -> Any:
        found = update(batch)
        waiting.append(len(scheduler.waiting_queue))
        return found

    scheduler.update_running_batch = noted
    return engine, waiting


def were_taken_back(waiting: list[int]) -> bool:
    return any(later > before for before, later in zip(waiting, waiting[1:], strict=False))


def of_90_tokens(kinds: Sequence[SamplingParams] = (SamplingParams(),)) -> list[Request]:
    ends = {"max_new_tokens": 90, "stop_token_ids": ()}
    return make_requests(8, [dataclasses.replace(kind, **ends) for kind in kinds])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kinds", "is_shared"),
    [([SamplingParams()], False), (PENALIZED, False), ([SamplingParams()], True)],
    ids=["plain", "penalized", "one prompt"],
)
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_sglang_engine_takes_requests_back_where_the_cache_is_too_small(
    request: pytest.FixtureRequest,
    is_overlapped: bool,
    kinds: list[SamplingParams],
    is_shared: bool,
) -> None:
    asked = of_90_tokens(kinds)
    if is_shared:
        asked = [dataclasses.replace(one, prompt=tuple(range(2, 20))) for one in asked]
    expected = generate(make_engine(QWEN3), asked)
    for one, done in zip(asked, expected, strict=True):
        wanted = penalized_logps(make_reference(QWEN3), one, done)
        assert np.allclose(done.logps, wanted, rtol=0, atol=LOGP_TOLERANCE)
    if is_overlapped:
        close_engines()
        request.getfixturevalue("overlapped")
    engine, waiting = short_of_room(QWEN3, TOKEN_BYTES)
    engine._shared_prompts = SharedPrompts(1)
    found = generate(engine, asked)
    assert were_taken_back(waiting)
    assert engine._scheduler.token_table._table is None, "the memory of penalties is given back"
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))


def test_sglang_engine_records_experts_before_it_takes_requests_back() -> None:
    """Those of the pass in which a position was computed first, though it is computed again."""
    expected = generate(make_engine(EXPERTS, records_experts=True), of_90_tokens())
    engine, waiting = short_of_room(EXPERTS, TOKEN_BYTES * 4 // 3, records_experts=True)
    engine.submit(of_90_tokens())
    begun: dict[int, Any] = {}
    while engine.has_unfinished:
        engine.step()
        for request in engine.pending():
            if request.blobs and request.request_id not in begun:
                begun[request.request_id] = request.blobs["routed_experts"]
                assert (
                    len(request.blobs["routed_experts"])
                    == len(request.prompt) + len(request.tokens) - 1
                )
    assert were_taken_back(waiting) and begun
    by_id = {done.request_id: done for done in engine.collect()}
    for one in expected:
        found = by_id[one.request_id]
        assert close(found, one) and np.array_equal(
            found.blobs["routed_experts"], one.blobs["routed_experts"]
        )
        if (first := begun.get(one.request_id)) is not None:
            assert np.array_equal(found.blobs["routed_experts"][: len(first)], first)


def test_sglang_engine_tells_experts_with_a_batch_under_way(
    request: pytest.FixtureRequest,
) -> None:
    requests = make_requests(25, MIXED)
    expected = generate(make_engine(EXPERTS, records_experts=True), requests)
    close_engines()
    request.getfixturevalue("overlapped")
    engine = make_engine(EXPERTS, records_experts=True)
    assert engine._scheduler.enable_overlap
    for interrupted in (False, True):
        engine.submit(requests)
        done = []
        for _ in range(6):
            engine.step()
        if interrupted:
            done += engine.collect()
            assert engine._scheduler.result_queue, "a batch is under way"
            write_weights(engine, make_reference(EXPERTS), 1)
            for one in engine.pending():
                if one.tokens:
                    assert len(one.blobs["routed_experts"]) == len(one.prompt) + len(one.tokens) - 1
        while engine.has_unfinished:
            engine.step()
        by_id = {one.request_id: one for one in [*done, *engine.collect()]}
        for one in expected:
            found = by_id[one.request_id]
            assert close(found, one) and np.array_equal(
                found.blobs["routed_experts"], one.blobs["routed_experts"]
            )


def test_sglang_engines_of_one_process_record_apart(request: pytest.FixtureRequest) -> None:
    requests = make_requests(6, SamplingParams(temperature=0.0, max_new_tokens=6))
    recording = make_engine(EXPERTS, records_experts=True)
    expected = generate(recording, requests)
    other = make_engine(EXPERTS)
    write_weights(other, make_reference(EXPERTS, 1), 0)
    assert all(not done.blobs for done in generate(other, requests))
    write_weights(recording, make_reference(EXPERTS), 1)
    with pytest.raises(
        RuntimeError, match="recorded no experts"
    ):  # those of older weights are gone
        recording._experts.get_topk(1, 2, recording._scheduler.req_to_token_pool)
    for one, two in zip(generate(recording, requests), expected, strict=True):
        assert close(one, two) and np.array_equal(
            one.blobs["routed_experts"], two.blobs["routed_experts"]
        )
    request.getfixturevalue("overlapped")
    first, second = (make_engine(EXPERTS, records_experts=True) for _ in range(2))
    long = (3, *range(2, 20)) * 5  # in places where the other engine has written nothing
    first.submit([Request(0, long, 7, SamplingParams(max_new_tokens=1))])
    first.step()
    assert first._scheduler.result_queue, "what finishes with the next step"
    second.submit(requests[:1])
    second.step()
    first.clear()
    assert not first.has_unfinished and second.has_unfinished


def test_sglang_engine_refuses_to_record_where_a_router_tells_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_routing, "_routed", lambda model: [0, 2])
    with pytest.raises(ModelError, match="in layers 0, 2; allowed.*: 0, 1, 2, 3, to record"):
        start_packaged(EXPERTS, records_experts=True)
    assert generate(make_engine(QWEN3), make_requests(2, MIXED))


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


def test_sglang_engine_refuses_kernels_for_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what SGLang itself asks before it packs the weights."""
    make_engine(QWEN3)  # SGLang is imported then
    from sglang.srt.utils import common

    monkeypatch.setattr(common, "is_amx_tile_supported", True)
    if hasattr(common, "is_intel_amx_backend_available"):  # 0.5.16
        monkeypatch.setattr(common, "is_intel_amx_backend_available", True)
    else:
        monkeypatch.setattr(common, "_is_intel_amx_backend_available", lambda: True)
    with pytest.raises(UserError, match="kernels for AMX, which pack the weights"):
        start_packaged(QWEN3)


def test_sglang_engine_keeps_weights_as_asked_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = generate(make_engine(QWEN3), make_requests(4, MIXED))
    from sglang.srt.model_loader import loader

    def load_otherwise(*given: Any, **named: Any) -> None:
        raise AssertionError("SGLang loads by another way")

    monkeypatch.setattr(loader, "load_model_with_cpu_quantization", load_otherwise)
    asked = [*sglang_start.OTHER_WEIGHTS, "SGL_CPU_QUANTIZATION"]
    for name in asked:
        monkeypatch.setenv(name, "1")
    found = generate(make_engine(QWEN3), make_requests(4, MIXED))
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))
    assert all(os.environ[name] == "1" for name in asked), "the user's own are there again"


def test_sglang_engine_turns_longrope_the_same_whatever_else_is_in_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the original length, 16 here, and with a longer request beside it."""
    pairs = PACKAGED_ALL[QWEN3]["head_dim"] // 2
    config = {
        **PACKAGED_ALL[QWEN3],
        "model_type": "phi3",
        "rope_parameters": {**longrope(pairs), "rope_theta": 10000.0},
        "original_max_position_embeddings": 16,
        "sliding_window": None,
    }
    config["rope_parameters"]["original_max_position_embeddings"] = 16
    settled = dict(at_length(config, 100))
    for models in (PACKAGED_ALL, ALL_MODELS):
        monkeypatch.setitem(models, "sglang-phi3", settled)
    engine, reference = make_engine("sglang-phi3"), make_reference("sglang-phi3")
    sampling = SamplingParams(max_new_tokens=8)
    short = Request(1, (5, 6, 7) * 4, 3, sampling)  # positions 11 to 18 are asked for
    long = Request(2, (8, 9, 10) * 20, 4, sampling)
    (alone,) = generate(engine, [short])
    beside, other = generate(engine, [short, long])
    assert close(alone, beside)
    for request, done in ((short, alone), (long, other)):
        expected = expected_logps(reference, request, done)
        assert np.allclose(done.logps, expected, rtol=0, atol=LOGP_TOLERANCE)
    with pytest.raises(ModelError, match="short_factor and long_factor, at .*rotary_emb of sglang"):
        start_packaged("sglang-phi3", hf_config=config)


def test_sglang_engine_gives_memory_back_by_sglangs_own_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On CPUs nothing is unmapped; that the calls are there, in order, and leave all as it was."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    requests = make_requests(6, MIXED)
    engine = make_engine(QWEN3)
    expected = generate(engine, requests)
    engine.submit(requests)
    engine.step()
    table = engine._scheduler.req_to_token_pool.req_to_token
    memory = engine._memory = SaverMemory(engine._scheduler, torch.device("cpu"))
    engine.sleep()
    assert memory.is_asleep
    engine.sleep()  # of a sleeping engine nothing is given back twice
    table.fill_(10**6)  # as memory that is mapped anew
    write_weights(engine, make_reference(QWEN3), 1)
    assert not memory.is_asleep and not table.any()
    table.fill_(1)
    write_weights(engine, make_reference(QWEN3), 2)  # of an engine that is awake
    assert table.all()
    engine.clear()
    found = generate(engine, requests)
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))


def test_sglang_allocates_where_it_is_told_while_it_starts() -> None:
    from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

    original = vars(TorchMemorySaverAdapter)["create"]
    pools = EnginePools(None, lambda: None, None)  # type: ignore[arg-type]
    with allocated_in(pools, torch.device("cpu")):
        assert TorchMemorySaverAdapter.create(enable=True).region == pools.region
        with TorchMemorySaverAdapter.create(enable=False).region("kv_cache"):
            pass  # nothing asked for memory that can be given back
        adapter = TorchMemorySaverAdapter.create(enable=True)
        assert not adapter.enabled  # else graphs are captured by torch_memory_saver
    assert vars(TorchMemorySaverAdapter)["create"] is original


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_sglang_engine_takes_the_number_of_a_request_again_that_its_text_has_ended(
    penalty: float, is_overlapped: bool, request: pytest.FixtureRequest
) -> None:
    """SGLang has such a request for one more turn, while others go on."""
    if is_overlapped:
        request.getfixturevalue("overlapped")
    engine = make_engine(QWEN3)
    sampling = SamplingParams(max_new_tokens=24, repetition_penalty=penalty)
    first, other = make_requests(2, sampling)
    whole, expected = generate(engine, [first, other])
    text = Letters().decode(whole.tokens, skip_special_tokens=False)
    stopped = dataclasses.replace(sampling, stop_strings=(text[3:6],))
    engine.token_texts = TokenTexts(Letters())
    cut = dataclasses.replace(first, sampling=stopped)
    engine.submit([cut, other])
    found: list[Completion] = []
    while not found:
        engine.step()
        found = engine.collect()
    assert found[0].tokens == whole.tokens[: text.find(text[3:6]) + 3]
    engine.submit([first])  # the same number, to its own end
    while engine.has_unfinished:
        engine.step()
    again = {done.request_id: done.tokens for done in engine.collect()}
    assert again == {first.request_id: whole.tokens, other.request_id: expected.tokens}
    generate(engine, [cut])
    engine.clear()  # while SGLang has it
    assert engine._scheduler.token_table._table is None
    assert generate(engine, [first])[0].tokens == whole.tokens


@pytest.mark.parametrize("is_taken_back", [False, True])
@pytest.mark.parametrize("is_overlapped", [False, True])
def test_sglang_engine_records_the_experts_of_responses_that_their_text_ends(
    is_overlapped: bool,
    is_taken_back: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if is_overlapped:
        request.getfixturevalue("overlapped")
    engine = make_engine(EXPERTS, records_experts=True)
    sampling = SamplingParams(max_new_tokens=24)
    requests = make_requests(8, sampling)
    whole = generate(engine, requests)
    texts = [Letters().decode(done.tokens, skip_special_tokens=False) for done in whole]
    strings = tuple(text[at : at + 2] for at, text in enumerate(texts))  # from the first token on
    engine.token_texts = TokenTexts(Letters())
    stopped = dataclasses.replace(sampling, stop_strings=strings)
    if is_taken_back:  # as where the cache is too small, also those that SGLang has a turn longer
        from sglang.srt.managers import scheduler

        monkeypatch.setattr(scheduler, "TEST_RETRACT", True)
        monkeypatch.setattr(scheduler, "TEST_RETRACT_INTERVAL", 2)
    engine.submit([dataclasses.replace(one, sampling=stopped) for one in requests])
    found: dict[int, Completion] = {}
    while engine.has_unfinished:
        engine.step()
        found |= {done.request_id: done for done in engine.collect()}
        if is_taken_back and found and engine.version == 0:
            write_weights(engine, make_reference(EXPERTS), 1)
    for one, text in zip(whole, texts, strict=True):
        done = found[one.request_id]
        length = min(text.find(string) for string in strings if string in text) + 2
        assert done.tokens == one.tokens[:length] and done.finish_reason == "stop"
        prompt = len(one.blobs["routed_experts"]) - len(one.tokens) + 1
        assert np.array_equal(
            done.blobs["routed_experts"], one.blobs["routed_experts"][: prompt + length - 1]
        )
