"""Qwen3 with mixtures of experts (30B-A3B, 235B-A22B): Qwen3's attention, optional dense layers."""

from __future__ import annotations

from hybridrl.models.families.decoder import decoder_family, decoder_shape
from hybridrl.models.families.experts import (
    EXPERT_KEYS,
    ExpertNames,
    configured_config,
    experts_per_token,
    listed_dense_layers,
    read_num_experts,
)
from hybridrl.models.families.reading import require, size
from hybridrl.models.family import HfConfig, ModelShape, MoeShape
from hybridrl.models.hf.config_keys import WINDOW_KEYS

EXPERT = "mlp.experts.{E}."
NAMES = ExpertNames("mlp.gate", f"{EXPERT}gate_proj", f"{EXPERT}up_proj", f"{EXPERT}down_proj")
# Windows have no effect unless `use_sliding_window` is set, which is false by default.
KEYS = frozenset(
    {
        "attention_bias",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        *WINDOW_KEYS,
    }
)


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; the defaults come from transformers' Qwen3MoeConfig."""
    require(hf_config, "attention_bias", False, (False,))
    num_experts = read_num_experts(hf_config, "num_experts", 128)
    moe = MoeShape(
        num_experts,
        experts_per_token(hf_config, num_experts, 8),
        size(hf_config, "moe_intermediate_size", 768),
        dense_layers=listed_dense_layers(hf_config, size(hf_config, "num_hidden_layers")),
    )
    # Unlike Qwen3Config, Qwen3MoeConfig has no default head size, so the default is hidden size /
    # heads.
    return decoder_shape(hf_config, qk_norm=True, default_kv_heads=4, moe=moe)


FAMILY = decoder_family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    shape,
    EXPERT_KEYS | KEYS,
    experts=NAMES,
    keywords=configured_config,
)
