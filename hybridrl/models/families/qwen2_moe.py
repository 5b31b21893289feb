"""Qwen2 with mixtures of experts (57B-A14B, Qwen1.5-MoE-A2.7B): Qwen2's attention, and a shared
expert whose output a gate multiplies.
"""

from __future__ import annotations

from hybridrl.models.families.decoder import decoder_family, decoder_shape
from hybridrl.models.families.experts import (
    LISTED_KEYS,
    ExpertNames,
    configured_config,
    listed_dense_layers,
    read_moe,
)
from hybridrl.models.families.reading import require, size
from hybridrl.models.family import HfConfig, ModelShape
from hybridrl.models.hf.config_keys import WINDOW_KEYS

NAMES = ExpertNames(shared="mlp.shared_expert.", shared_gate="mlp.shared_expert_gate")
# Windows have no effect unless `use_sliding_window` is set, which is false by default.
KEYS = LISTED_KEYS | {"qkv_bias", "shared_expert_intermediate_size", *WINDOW_KEYS}


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; the defaults come from transformers' Qwen2MoeConfig."""
    require(hf_config, "qkv_bias", True, (True,))
    # vLLM ignores `head_dim` in this architecture.
    head_dim = size(hf_config, "hidden_size") // size(hf_config, "num_attention_heads")
    require(hf_config, "head_dim", head_dim, (head_dim,))
    moe = read_moe(
        hf_config,
        60,
        4,
        1408,
        shared_ffn_size=size(hf_config, "shared_expert_intermediate_size", 5632),
        has_shared_gate=True,
        dense_layers=listed_dense_layers(hf_config),
    )
    return decoder_shape(hf_config, qkv_bias=True, default_kv_heads=16, moe=moe)


FAMILY = decoder_family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    shape,
    KEYS,
    experts=NAMES,
    keywords=configured_config,
)
