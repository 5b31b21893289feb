"""FLOP counts against numbers worked out by hand."""

from __future__ import annotations

import pytest

from hybridrl.metrics.flops import (
    attention_length,
    forward_flops,
    generate_flops,
    layer_matmul_params,
    num_generated,
    peak_flops_per_s,
    train_flops,
)
from hybridrl.models.families.qwen2 import shape

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


def test_layer_matmul_params_of_qwen25_05b() -> None:
    # q, o: 896 x 896; k, v: 896 x 128; gate, up, down: 896 x 4864.
    assert layer_matmul_params(shape(QWEN25_05B)) == 2 * 802_816 + 2 * 114_688 + 3 * 4_358_144


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


def test_attention_costs_as_much_as_all_weights_at_its_length() -> None:
    model = shape(QWEN25_05B)
    length = attention_length(model)
    weights = 2 * 493_961_216 * length
    # To a part in the length: a position's pair with itself counts whole.
    assert length == 22970 and abs(forward_flops(model, [length], length) / weights - 2) < 1e-3


def test_generate_flops_counts_a_shared_prompt_once() -> None:
    model = shape(QWEN25_05B)
    body, pair, head = 2 * 24 * 14_909_440, 24 * 4 * 896, 2 * 151_936 * 896
    # Prompt of 2 (3 pairs); responses of 1 and 2 tokens: positions 3 (3 pairs), and 3, 4 (3 + 4).
    expected = (2 + 1 + 2) * body + (3 + 3 + 7) * pair + 3 * head
    assert generate_flops(model, {0: (2, [3, 4])}) == expected
    assert generate_flops(model, {0: (2, [3, 4]), 7: (2, [3, 4])}) == 2 * expected
    assert (generate_flops(model, {}), num_generated({0: (2, [3, 4])})) == (0, 7)


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
