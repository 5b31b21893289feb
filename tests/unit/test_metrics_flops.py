"""FLOP counts against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.metrics.flops import (
    attended_pairs,
    forward_flops,
    generate_flops,
    matmul_params,
    num_generated,
    peak_flops_per_s,
    train_flops,
)
from hybridrl.models.families.qwen2 import shape
from hybridrl.models.family import ModelShape, MoeShape, resolve_family
from hybridrl.models.trainable import ALL
from hybridrl.roles.roles import Roles
from hybridrl.training.batches.prompt_sharing import Unit, shared_tokens
from hybridrl.training.model import ModelSource

QWEN25_05B = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def test_matmul_params_of_qwen3_30b_a3b_are_the_active_ones() -> None:
    moe = MoeShape(128, 8, 768)
    of = ModelShape(48, 2048, 32, 4, 128, 6144, 151936, qk_norm=True, moe=moe)
    layer = 2 * 2048 * 4096 + 2 * 2048 * 512 + 2048 * 128 + 8 * 3 * 2048 * 768
    assert matmul_params(of) == 48 * layer
    # The model's name says 3.3 billion active parameters; the embedding's 0.6 are counted twice.
    assert 48 * layer + 2 * 2048 * 151936 == pytest.approx(3.35e9, rel=0.01)
    dense = replace(of, moe=replace(moe, dense_layers=(0,)))
    assert matmul_params(dense) - 48 * layer == 3 * 2048 * 6144 - (8 * 3 * 2048 * 768 + 2048 * 128)


def test_forward_flops_of_qwen25_05b() -> None:
    model = shape(QWEN25_05B)
    # 24 layers of 14,909,440 weights and the 151936 x 896 head are the model's 493,961,216 matmul
    # weights (its 494,032,768 parameters less norms, biases: 71,552).
    assert forward_flops(model, [1], 1) == 2 * 493_961_216 + 24 * 4 * 896
    # Length 3 has 6 causal pairs, length 2 has 3; a pair costs 4 x 896 in each of 24 layers.
    assert forward_flops(model, [3, 2], 5) == 5 * 2 * 493_961_216 + 9 * 24 * 4 * 896
    assert forward_flops(model, [3], head_tokens=1) == (
        6 * 24 * 14_909_440 + 2 * 151_936 * 896 + 6 * 24 * 4 * 896
    )
    assert forward_flops(model, [3], 3, head_size=1) == 6 * 24 * 14_909_440 + 6 * 896 + 516_096
    assert train_flops(model, [3, 2], 4) == 3 * forward_flops(model, [3, 2], 4)


def test_training_counts_the_layer_for_multi_token_prediction() -> None:
    """One more layer with attention, 2 hidden² weights, and a head without weight gradients."""
    plain = shape(QWEN25_05B)
    trained = replace(plain, has_mtp=True)
    layer = 7 * 2 * (14_909_440 + 2 * 896**2) + (10 + 6) * 4 * 896  # 4 and 3 positions
    found = train_flops(trained, [4, 3], 5) - train_flops(plain, [4, 3], 5)
    assert found == 3 * layer + 2 * 5 * 2 * 151_936 * 896
    assert forward_flops(trained, [4, 3], 5) == forward_flops(plain, [4, 3], 5)


def test_a_windowed_layer_counts_the_pairs_of_its_window() -> None:
    plain = replace(shape(QWEN25_05B), num_layers=3)
    windowed = replace(plain, window=4, num_whole_layers=1)
    for length in (0, 1, 3, 4, 5, 11):
        pairs = sum(min(query + 1, 4) for query in range(length))
        assert attended_pairs(windowed, length) == length * (length + 1) // 2 + 2 * pairs
        assert attended_pairs(plain, length) == 3 * length * (length + 1) // 2


def test_a_shared_prompt_is_computed_once() -> None:
    """As a unit of three samples: its positions, and the pairs that they attend to."""
    model = shape(QWEN25_05B)
    unit = Unit((0, 1, 2), 9, (12, 11, 15))
    groups, prompts = [4, 4, 4, 5], [10, 10, 10, 10]
    prefixes = shared_tokens([[(0, 1, 2)], [(3,)]], groups, prompts)
    assert prefixes == [0, 9, 9, 0]
    found = forward_flops(model, unit.lengths, 0, prefixes=prefixes[:3])
    pairs = (unit.attended + unit.tokens) // 2  # of a position with itself, too
    assert found == unit.tokens * 2 * 24 * 14_909_440 + pairs * 24 * 4 * 896


def test_generate_flops_counts_a_shared_prompt_once() -> None:
    model = shape(QWEN25_05B)
    body, pair, head = 2 * 24 * 14_909_440, 24 * 4 * 896, 2 * 151_936 * 896
    # Prompt of 2 (3 pairs); responses of 1 and 2 tokens: positions 3 (3 pairs), and 3, 4 (3 + 4).
    expected = (2 + 1 + 2) * body + (3 + 3 + 7) * pair + 3 * head
    samples = [(3, 1), (4, 2)]
    assert generate_flops(model, {0: (2, samples)}) == expected
    assert generate_flops(model, {0: (2, samples), 7: (2, samples)}) == 2 * expected
    assert (generate_flops(model, {}), num_generated({0: (2, samples)})) == (0, 7)
    # The second's first token after the prompt is an observation: it is read, without logits.
    assert generate_flops(model, {0: (2, [(3, 1), (4, 1)])}) == expected - head
    assert num_generated({0: (2, [(3, 1), (4, 1)])}) == 7


def test_flops_of_terms_are_those_of_their_columns_and_their_update() -> None:
    family = resolve_family("qwen2", QWEN25_05B)
    source = ModelSource(family, QWEN25_05B, torch.float32, "qwen2", Path())
    body, pair, head = 2 * 24 * 14_909_440, 24 * 4 * 896, 2 * 151_936 * 896
    here = Producer.here("the test of FLOPs")

    def batch(*sizes: tuple[int, int], **columns: bool) -> TrainBatch:
        """Of prompts and responses of these sizes."""
        prompts = [Prompt(i, "", (1,) * p, {}, (1,) * r) for i, (p, r) in enumerate(sizes)]
        made = TrainBatch.supervised(prompts, here)
        zeros_T = torch.zeros(made.num_tokens)
        return made.join_columns(here, **dict.fromkeys(columns, zeros_T))

    looked_up = {"old_logp_T": True}
    main = batch((2, 1), **looked_up)  # 3 tokens, 6 pairs, 1 logit
    sft = batch((1, 2), (2, 2))  # 7 tokens, 6 + 10 pairs, 4 logits
    pairs = batch((1, 1), (1, 3), **looked_up, reference_logp_T=True)  # 6, 3 + 10, 4
    one, of_sft = 3 * body + 6 * pair + head, 7 * body + 16 * pair + 4 * head
    of_pairs = 6 * body + 13 * pair + 4 * head
    shared = {id(main): [0], id(sft): [0, 0], id(pairs): [0, 0]}
    planner = SimpleNamespace(
        shares_prompts=True, shared_tokens=lambda batch, is_lookup=False: shared[id(batch)]
    )
    model = SimpleNamespace(
        planner=planner,
        source=source,
        shape=source.shape,
        backward=ALL,
        active_adapter_params=0,
    )
    policy: Any = SimpleNamespace(model=model)
    roles = Roles(source, policy, None, None, {"policy": None}, 0)  # type: ignore[dict-item]
    assert roles.flops(main, 0, {}) == {"generate": 0, "logprobs": one, "update": 3 * one}
    mixed = roles.flops(main, 0, {}, [sft, pairs])
    # Backward passes cost twice what forward passes do; pairs are looked up twice before.
    assert mixed == {
        "generate": 0,
        "logprobs": one,
        "update": 3 * one + 3 * of_sft + (2 + 3) * of_pairs,
    }
    names = ("train/shared_positions", "train/shared_prompts_speedup")
    assert roles.sharing(sft) == dict(zip(names, (0.0, 1.0), strict=True))
    shared[id(sft)] = [0, 1]  # the second's first token is computed with the first sample
    assert roles.flops(sft, 0, {})["update"] == 3 * (of_sft - body - pair)
    positions, speedup = map(roles.sharing(sft).get, names)
    assert positions == pytest.approx(1 / 7)
    assert speedup == pytest.approx(of_sft / (of_sft - body - pair))
    warming_up = replace(roles, num_critic_warmup_steps=1)
    assert warming_up.flops(main, 0, {})["update"] == 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA H20", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_peak_flops_per_s_by_name(name: str, peak: float | None) -> None:
    assert peak_flops_per_s(name) == peak
