"""Qwen3 with mixtures of experts (30B-A3B, 235B-A22B): attention as Qwen3, some layers may be
dense.
"""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.experts import (
    EXPERT_KEYS,
    ExpertNames,
    expert_config,
    expert_rows,
    experts_per_token,
    is_renormalized,
)
from hybridrl.models.families.reading import refusal, require, size
from hybridrl.models.families.rotary import rope_keywords
from hybridrl.models.family import Family, HfConfig, ModelShape, MoeShape, Row
from hybridrl.models.hf.config_keys import DECODER_KEYS, WINDOW_KEYS

EXPERT = "mlp.experts.{E}."
NAMES = ExpertNames("mlp.gate", f"{EXPERT}gate_proj", f"{EXPERT}up_proj", f"{EXPERT}down_proj")


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; defaults are those of transformers' Qwen3MoeConfig."""
    require(hf_config, "attention_bias", False, (False,))
    num_layers = size(hf_config, "num_hidden_layers")
    num_experts = _num_experts(hf_config)
    moe = MoeShape(
        num_experts,
        experts_per_token(hf_config, num_experts, 8),
        size(hf_config, "moe_intermediate_size", 768),
        dense_layers=_dense_layers(hf_config, num_layers),
    )
    # transformers' config has no head size of its own: it is hidden size / heads where absent.
    return decoder_shape(hf_config, qk_norm=True, default_kv_heads=4, moe=moe)


def _num_experts(hf_config: HfConfig) -> int:
    """Returns the number of experts: transformers before 5 writes `num_experts`, since then
    `num_local_experts`.
    """
    keys = ("num_experts", "num_local_experts")
    found = {key: size(hf_config, key) for key in keys if hf_config.get(key) is not None}
    if len(set(found.values())) > 1:
        raise refusal(keys[1], found[keys[1]], f"the same as num_experts = {found[keys[0]]}")
    return next(iter(found.values()), 128)


def _dense_layers(hf_config: HfConfig, num_layers: int) -> tuple[int, ...]:
    named = hf_config.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, list | tuple) or not all(type(one) is int for one in named):
        raise refusal("mlp_only_layers", named, "a list of layer indices, or null")
    every = size(hf_config, "decoder_sparse_step", 1)
    dense = tuple(
        layer for layer in range(num_layers) if layer in named or (layer + 1) % every != 0
    )
    if len(dense) == num_layers:
        raise refusal(
            "mlp_only_layers, decoder_sparse_step",
            f"{named}, {every}",
            f"values that leave one of the {num_layers} layers with experts",
        )
    return dense


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of TransformerConfig."""
    found = shape(hf_config)
    experts = expert_config(hf_config, found, is_renormalized(hf_config))
    return decoder_config(hf_config, found) | experts


def rows(shape: ModelShape) -> tuple[Row, ...]:
    """Returns the weight table."""
    return decoder_rows(shape, expert_rows(shape, NAMES))


FAMILY = Family(
    "qwen3_moe",
    ("Qwen3MoeForCausalLM",),
    shape,
    transformer_config,
    rope_keywords,
    rows,
    # Windows have no effect without `use_sliding_window`, which is false where it is absent.
    config_keys=DECODER_KEYS
    | EXPERT_KEYS
    | {
        "attention_bias",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_local_experts",
        *WINDOW_KEYS,
    },
)
