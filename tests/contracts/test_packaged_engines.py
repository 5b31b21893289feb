"""What engines of packages owe beyond the contract of all: live weights, limits, self-test."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import (
    LOGP_TOLERANCE,
    MIXED,
    VOCAB,
    close_engines,
    expected_logps,
    make_engine,
    make_reference,
    make_requests,
    start_packaged,
    write_weights,
)
from packaged import FUSED_LAYOUT, PACKAGED

from hybridrl.errors import ModelError, UserError
from hybridrl.models.weights import RankLayout, Region, fused_layout
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.platform import Platform
from hybridrl.rollout.common.groups import ranks_by_place, replica_members
from hybridrl.rollout.engine import Request, SamplingParams, generate

pytestmark = pytest.mark.usefixtures("process_group", "closed_engines")


@pytest.mark.parametrize("engine", PACKAGED)
def test_packaged_engine_takes_every_seed(engine: str) -> None:
    sampling = SamplingParams(max_new_tokens=12)
    seeds = (0, 2**63 - 1, 2**63, 2**64 - 1)
    requests = [Request(i, (5, 6, 7), seed, sampling) for i, seed in enumerate(seeds)]
    assert len({done.tokens for done in generate(make_engine(f"{engine}-qwen3"), requests)}) == 4


@pytest.mark.parametrize("engine", PACKAGED)
def test_packaged_engine_leaves_the_trainer_as_it_was(engine: str) -> None:
    def state() -> tuple[Any, ...]:
        numpy = np.random.get_state()[1].tobytes()
        return torch.get_rng_state().tolist(), numpy, random.getstate()

    torch.manual_seed(5)
    before, set_num_threads = state(), torch.set_num_threads
    num_threads = torch.get_num_threads()
    dtype, is_grad_enabled = torch.get_default_dtype(), torch.is_grad_enabled()
    generate(make_engine(f"{engine}-qwen3"), make_requests(6, MIXED))
    close_engines()
    assert state() == before
    assert torch.set_num_threads is set_num_threads
    assert torch.get_num_threads() == num_threads
    assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (dtype, is_grad_enabled)
    assert torch.distributed.is_initialized(), "its shutdown ends the trainer's process group"


@pytest.mark.parametrize("engine", PACKAGED)
def test_packaged_engine_refuses_requests_longer_than_it_was_started_for(engine: str) -> None:
    started = start_packaged(f"{engine}-qwen3", max_tokens=100)
    with pytest.raises(ValueError, match="request 7 has 60 prompt"):
        started.submit([Request(7, (1,) * 60, 0, SamplingParams(max_new_tokens=41))])
    assert not started.has_unfinished
    write_weights(started, make_reference(f"{engine}-qwen3"), 0)
    (done,) = generate(started, [Request(7, (2,) * 60, 0, SamplingParams(max_new_tokens=40))])
    assert len(done.tokens) == 40


@pytest.mark.parametrize("engine", PACKAGED)
def test_packaged_engine_parameters_are_live_contiguous_and_of_one_dtype(engine: str) -> None:
    started = start_packaged(f"{engine}-qwen2-tied")
    tensors = started.tensors()
    assert all(t.is_contiguous() and t.dtype == torch.float32 for t in tensors.values())
    assert tensors["model.layers.0.self_attn.qkv_proj.bias"].shape == (8 * 32,)


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


@pytest.mark.parametrize("engine", PACKAGED)
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
def test_packaged_engine_refuses_a_wrong_weight_table_by_the_parameter(
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[RankLayout], RankLayout],
    named: str,
    engine: str,
) -> None:
    def faulty(*arguments: Any) -> RankLayout:
        return fault(fused_layout(*arguments))

    monkeypatch.setattr(FUSED_LAYOUT, faulty)
    with pytest.raises(ModelError, match=named) as caught:
        start_packaged(f"{engine}-qwen2-tied")
    assert f"{engine}" in str(caught.value)


@pytest.mark.parametrize("engine", PACKAGED)
def test_packaged_engine_refuses_an_unknown_model_and_starts_another(engine: str) -> None:
    with pytest.raises(UserError, match="NoSuchModel"):
        start_packaged(f"{engine}-qwen3", architectures=["NoSuchModel"])
    make_engine(f"{engine}-qwen3")  # what the failed start left does not stop another engine


def test_packaged_engine_refuses_ranks_in_descending_order() -> None:
    layout = RolloutLayout(2, ((0, 1), (1, 0), (0, 0), (1, 1)))
    assert replica_members(layout, 3) == [1, 3]
    with pytest.raises(ValueError, match=r"replica 0 has ranks \[2, 0\].*must ascend"):
        replica_members(layout, 0)


def test_ranks_stand_at_their_places() -> None:
    assert ranks_by_place(RolloutLayout(2, ((0, 0), (1, 0), (0, 1), (1, 1)))) == [0, 2, 1, 3]
    assert ranks_by_place(RolloutLayout(1, (None, (1, 0), (0, 0)))) == [2, 1]


@pytest.mark.parametrize("engine", PACKAGED)
def test_packaged_engine_starts_anew_in_another_world(engine: str) -> None:
    requests = make_requests(3, MIXED)
    expected = generate(make_engine(f"{engine}-qwen3"), requests)
    stop_process_group()  # and nobody closed the engine
    start_process_group(Platform.detect(), 60)
    assert generate(make_engine(f"{engine}-qwen3"), requests) == expected


@pytest.mark.parametrize("engine", PACKAGED)
def test_packaged_engine_needs_a_process_group(engine: str) -> None:
    stop_process_group()
    try:
        with pytest.raises(RuntimeError, match="process group first"):
            start_packaged(f"{engine}-qwen3")
    finally:
        start_process_group(Platform.detect(), 60)


@pytest.mark.parametrize("engine", PACKAGED)
def test_packaged_engine_forgets_prompts_after_an_update(engine: str) -> None:
    """A prompt that it had in its cache is computed anew with the weights of now."""
    started = make_engine(f"{engine}-qwen3")
    sampling = SamplingParams(temperature=0.0, max_new_tokens=40)
    prompt = tuple(np.random.default_rng(3).integers(2, VOCAB, 100).tolist())
    for version in range(2):
        model = make_reference(f"{engine}-qwen3", seed=version)
        write_weights(started, model, version)
        for number in range(2):
            request = Request(number, prompt, 5, sampling)
            (done,) = generate(started, [request])
            expected = expected_logps(model, request, done)
            np.testing.assert_allclose(done.logps, expected, rtol=0, atol=LOGP_TOLERANCE)
