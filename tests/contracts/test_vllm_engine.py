"""What the vLLM engine owes beyond the contract of all engines: live weights, limits, self-test."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from engine_cases import (
    HF_MODELS,
    LOGP_TOLERANCE,
    MIXED,
    PACKAGED_MODELS,
    VOCAB,
    Letters,
    close,
    close_engines,
    expected_logps,
    make_engine,
    make_reference,
    make_requests,
    start_packaged,
    write_weights,
)
from packaged import needs
from scheduler_cases import Kind, compare_schedulers
from some_cases import some

from hybridrl.errors import UserError
from hybridrl.rollout.engine import Completion, Request, SamplingParams, TokenTexts, generate
from hybridrl.rollout.vllm.arguments import CPU_BLOCK_SIZE
from hybridrl.rollout.vllm.decoding import StepTokens

pytestmark = [*needs("vllm"), pytest.mark.usefixtures("process_group", "closed_engines")]

NAMES = [f"vllm-{name}" for name in HF_MODELS]
QWEN3, MIXTURE = NAMES[0], "vllm-qwen3-moe"


def long_request(request_id: int, sampling: SamplingParams) -> Request:
    rng = np.random.default_rng(3)
    return Request(request_id, tuple(rng.integers(2, VOCAB, 100).tolist()), 5, sampling)


@pytest.mark.parametrize("name", some(NAMES, 1))
def test_vllm_engine_shares_long_prompts_and_forgets_them_after_an_update(name: str) -> None:
    engine, sampling = make_engine(name), SamplingParams(temperature=0.0, max_new_tokens=40)
    cached: list[int] = []
    core = engine._live.llm.engine_core
    get_output = core.get_output

    def noted_output() -> Any:
        found = get_output()
        stats = (output.prefill_stats for output in found.outputs)
        cached.extend(one.num_cached_tokens for one in stats if one is not None)
        return found

    core.get_output = noted_output
    for version in range(2):
        model = make_reference(name, seed=version)
        write_weights(engine, model, version)
        for number in range(2):
            request = long_request(number, sampling)
            cached.clear()
            (done,) = generate(engine, [request])
            assert cached[0] == (number and 100 // CPU_BLOCK_SIZE * CPU_BLOCK_SIZE)
            expected = expected_logps(model, request, done)
            np.testing.assert_allclose(done.logps, expected, rtol=0, atol=LOGP_TOLERANCE)


def short_of_blocks(name: str, num_layers: int, **settings: Any) -> Any:
    """Returns an engine whose cache is too small for eight requests of 90 tokens."""
    num_bytes = 12 * 2 * num_layers * 2 * 32 * 4 * CPU_BLOCK_SIZE
    engine = start_packaged(name, max_tokens=110, kv_cache_bytes=num_bytes, **settings)
    write_weights(engine, make_reference(name), 0)
    scheduler = engine._live.llm.engine_core.engine_core.scheduler
    assert scheduler.kv_cache_manager.block_pool.num_gpu_blocks == 12
    return engine


def test_vllm_engine_preempts_where_the_cache_is_too_small_and_draws_the_same() -> None:
    requests = [
        replace(request, sampling=SamplingParams(max_new_tokens=90))
        for request in make_requests(8, MIXED)
    ]
    expected = generate(make_engine(QWEN3), requests)
    engine = short_of_blocks(QWEN3, num_layers=3)
    scheduler = engine._live.llm.engine_core.engine_core.scheduler
    preempted: list[str] = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *args, **keywords: (
        preempted.append(request.request_id),
        preempt(request, *args, **keywords),
    )
    found = generate(engine, requests)
    assert preempted
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))


def test_vllm_engine_keeps_the_experts_of_requests_that_it_preempts() -> None:
    """Also where all are taken out while some wait to be computed again."""
    requests = [
        replace(request, sampling=SamplingParams(max_new_tokens=90))
        for request in make_requests(8, MIXED)
    ]
    expected = generate(make_engine(MIXTURE, records_experts=True), requests)
    engine = short_of_blocks(MIXTURE, num_layers=4, records_experts=True)
    scheduler = engine._live.llm.engine_core.engine_core.scheduler
    found, num_taken_out, num_preempted = dict[int, Completion](), 0, 0
    engine.submit(requests)
    while engine.has_unfinished:
        engine.step()
        found |= {one.request_id: one for one in engine.collect()}
        preempted = [one for one in scheduler.requests.values() if one.num_preemptions]
        num_preempted += len(preempted)
        if num_taken_out < 2 and any(not one.num_computed_tokens for one in preempted):
            begun = engine.pending()
            for one in begun:
                assert len(one.blobs["routed_experts"]) == len(one.prompt) + len(one.tokens) - 1
            engine.clear()
            engine.submit(begun)
            num_taken_out += 1
    assert num_taken_out == 2 and num_preempted > 2
    for one in expected:
        assert close(found[one.request_id], one)
        assert np.array_equal(
            found[one.request_id].blobs["routed_experts"], one.blobs["routed_experts"]
        )


def test_vllm_engine_has_as_many_requests_as_it_decodes_together_the_first_ones() -> None:
    engine = make_engine(QWEN3, max_batch=4)
    requests = make_requests(10, MIXED)
    alone = [done for one in requests[6:8] for done in generate(engine, [one])]
    engine.submit(requests)
    begun, most, found = list[int](), 0, dict[int, Completion]()
    while engine.has_unfinished:
        engine.step()
        held = [row.request.request_id for row in engine._running.values()]
        begun += [one for one in held if one not in begun]
        most = max(most, len(held))
        found |= {done.request_id: done for done in engine.collect()}
    assert begun == sorted(begun) and set(begun) <= set(found), "in the order of arrival"
    assert most <= 4 and len(found) == 10
    assert all(close(one, found[one.request_id]) for one in alone)


def test_vllm_engine_finds_what_an_earlier_start_compiled(monkeypatch, tmp_path) -> None:
    from vllm.model_executor.models import registry

    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))  # nothing is known of the model's class
    registry._try_inspect_model_cls.cache_clear()
    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
    keys = set()
    for _ in range(2):
        keys.add(start_packaged(QWEN3)._live.llm.vllm_config.compute_hash())
        close_engines()
    assert len(keys) == 1


@pytest.mark.parametrize("is_second_runner", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_vllm_engine_schedules_as_vllm_does(is_async: bool, is_second_runner: bool) -> None:
    core = start_packaged(QWEN3)._live.llm.engine_core.engine_core
    # Fewer requests than are decoded together, more of them, more than the cache holds, and prompts
    # in parts.
    cases = [(200, 8192, 6, 0.2), (200, 8192, 30, 0.4), (14, 8192, 30, 0.8), (200, 16, 30, 0.8)]
    for num_blocks, max_tokens, num_requests, most in cases:
        kind = Kind(is_async, is_second_runner, num_blocks, max_tokens)
        ours, total = compare_schedulers(core, kind, num_requests)
        assert bool(ours.preempted) == (num_blocks == 14)
        assert bool(total["parts"]) == (max_tokens == 16)
        assert ours.counts["together"] > 0.3 * total["schedule"], (ours.counts, total)
        for what in ("schedule", "tokens"):  # vLLM's own way has few of them, but some
            assert 0 < ours.counts[what] < most * total[what], (what, ours.counts, total)
    ours, total = compare_schedulers(core, kind, num_requests, is_known=False)
    assert dict(ours.counts) == {name: total[name] for name in ("schedule", "tokens")}


def test_vllm_engine_generates_by_the_shortcuts() -> None:
    engine = make_engine(QWEN3)
    decoding, taken = engine._decoding, list[int]()
    take_steps = decoding.take_steps

    def noted() -> list[StepTokens]:
        steps = take_steps()
        taken.extend(len(step.tokens) for step in steps)
        return steps

    decoding.take_steps = noted
    done = generate(engine, make_requests(6, SamplingParams(max_new_tokens=40)))
    assert sum(taken) == sum(len(one.tokens) - 2 for one in done if len(one.tokens) > 1)


def test_vllm_engine_keeps_what_it_drew_when_it_is_stopped() -> None:
    engine = make_engine(QWEN3)
    engine.submit(make_requests(3, SamplingParams(max_new_tokens=30)))
    for _ in range(8):
        engine.step()
    engine.begin_update()
    engine.finish_update(1)
    held = [len(request.tokens) for request in engine.pending()]
    assert min(held) > 5
    assert [one.runs for one in engine.pending()] == [((0, count),) for count in held]
    while engine.has_unfinished:
        engine.step()
    done = sorted(engine.collect(), key=lambda one: one.request_id)
    assert [one.versions for one in done] == [((0, count), (1, 30 - count)) for count in held]


def test_vllm_engine_ends_by_text_what_began_before_others() -> None:
    engine = make_engine(MIXTURE, records_experts=True)
    engine.token_texts = TokenTexts(Letters())
    (first, *others) = make_requests(4, SamplingParams(max_new_tokens=40))
    (whole,) = generate(engine, [first])
    text = Letters().decode(whole.tokens, skip_special_tokens=False)
    string = text[30:32]
    engine.submit([replace(first, sampling=replace(first.sampling, stop_strings=(string,)))])
    engine.step()
    engine.submit(others)
    while engine.has_unfinished:
        engine.step()
    done = {one.request_id: one for one in engine.collect()}
    length = text.find(string) + 2
    cut = done[first.request_id]
    assert cut.tokens == whole.tokens[:length]
    assert np.array_equal(
        cut.blobs["routed_experts"], whole.blobs["routed_experts"][: len(first.prompt) + length - 1]
    )
    assert [len(done[one.request_id].tokens) for one in others] == [40] * 3


def test_vllm_engine_reports_every_token_to_the_other_ranks_of_its_replica() -> None:
    engine, reported = make_engine(QWEN3), defaultdict[int, list[int]](list)

    def report(names: list[str], tokens: list[int]) -> None:
        for name, token in zip(names, tokens, strict=True):
            reported[int(name.split("-")[0])].append(token)

    engine._agreement = SimpleNamespace(settle=lambda is_last=False: None, report=report)
    for done in generate(engine, make_requests(5, MIXED)):
        assert tuple(reported[done.request_id]) == done.tokens


@pytest.mark.parametrize("wrong", [float("nan"), 0.5])
def test_vllm_engine_refuses_log_probabilities_that_are_none(wrong: float) -> None:
    engine = make_engine(QWEN3)
    take_steps = engine._decoding.take_steps

    def spoiled() -> list[StepTokens]:
        return [step._replace(logps=[*step.logps[:-1], wrong]) for step in take_steps()]

    engine._decoding.take_steps = spoiled
    with pytest.raises(RuntimeError, match=f"log-probability {wrong} for request 102"):
        generate(engine, make_requests(3, SamplingParams(max_new_tokens=12)))


SHORT = SamplingParams(max_new_tokens=4)


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (replace(SHORT, temperature=1e-3), "temperature"),
        (
            replace(SHORT, stop_token_ids=(*range(2, 130),), min_new_tokens=1),
            "has 129 stop_token_ids, including the model's; vLLM allows at most 128",
        ),
    ],
)
def test_vllm_engine_refuses_what_vllm_would_cut_or_change(
    sampling: SamplingParams, message: str
) -> None:
    engine = start_packaged(QWEN3, max_tokens=100)
    with pytest.raises(ValueError, match=message):
        engine.submit([Request(8, (2,), 0, sampling)])
    assert not engine.has_unfinished


def test_vllm_engine_refuses_head_sizes_without_a_kernel() -> None:
    with pytest.raises(UserError, match="got 24; allowed: one of 32"):
        start_packaged(QWEN3, hf_config={**PACKAGED_MODELS[QWEN3], "head_dim": 24})


@pytest.mark.parametrize(("num_blocks", "allowed"), [(5, "at most 128"), (0, "less")])
def test_vllm_engine_refuses_a_cache_that_holds_no_longest_request(
    num_blocks: int, allowed: str
) -> None:
    block = 2 * 3 * 2 * 32 * 4 * CPU_BLOCK_SIZE
    keys = r"data\.max_prompt_tokens \+ rollout\.max_new_tokens"
    with pytest.raises(UserError, match=f"{keys}: got 300 tokens; allowed: {allowed}.*Lower one"):
        start_packaged(QWEN3, kv_cache_bytes=num_blocks * block or 1)
    assert generate(make_engine(QWEN3), make_requests(2, MIXED))
