"""Mixtral (8x7B, 8x22B): every layer is a mixture of experts, attention without biases."""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.experts import (
    EXPERT_KEYS,
    ExpertNames,
    expert_config,
    expert_rows,
    experts_per_token,
)
from hybridrl.models.families.reading import require, size
from hybridrl.models.families.rotary import rope_keywords
from hybridrl.models.family import Family, HfConfig, ModelShape, MoeShape, Row
from hybridrl.models.hf.config_keys import DECODER_KEYS

EXPERT = "block_sparse_moe.experts.{E}."
NAMES = ExpertNames("block_sparse_moe.gate", f"{EXPERT}w1", f"{EXPERT}w3", f"{EXPERT}w2")
DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6}  # of transformers' MixtralConfig


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; `intermediate_size` is an expert's."""
    require(hf_config, "router_jitter_noise", 0.0, (0.0, 0))
    # A window is used wherever it is set: this family has no `use_sliding_window`.
    require(hf_config, "sliding_window", None, (None,))
    num_experts = size(hf_config, "num_local_experts", 8)
    chosen = experts_per_token(hf_config, num_experts, 2)
    moe = MoeShape(num_experts, chosen, size(hf_config, "intermediate_size"))
    return decoder_shape(hf_config, default_kv_heads=8, moe=moe)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of TransformerConfig."""
    found = shape(hf_config)
    experts = expert_config(hf_config, found, renormalized=True)
    return decoder_config({**DEFAULTS, **hf_config}, found) | experts


def model_keywords(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of GPTModel for positions."""
    return rope_keywords({**DEFAULTS, **hf_config})


def rows(shape: ModelShape) -> tuple[Row, ...]:
    """Returns the weight table."""
    return decoder_rows(shape, expert_rows(shape, NAMES))


FAMILY = Family(
    "mixtral",
    ("MixtralForCausalLM",),
    shape,
    transformer_config,
    model_keywords,
    rows,
    config_keys=DECODER_KEYS
    | EXPERT_KEYS
    | {"num_local_experts", "router_jitter_noise", "sliding_window"},
)
