"""GLM-4.5, 4.6 and 4.7: grouped-query attention, a shared expert, and a router with a bias.

Rotary positions rotate half of each head. A checkpoint may contain a layer for multi-token
prediction (MTP) after the last layer, which training passes over.
"""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_family, decoder_shape
from hybridrl.models.families.experts import (
    EXPERT_KEYS,
    ExpertNames,
    biased_config,
    expert_config,
    experts_per_token,
    leading_dense_layers,
    read_biased_routing,
    read_num_experts,
)
from hybridrl.models.families.reading import flag, size
from hybridrl.models.family import HfConfig, ModelShape, MoeShape

EXPERT, SHARED = "mlp.experts.{E}.", "mlp.shared_experts."
NAMES = ExpertNames(
    "mlp.gate",
    f"{EXPERT}gate_proj",
    f"{EXPERT}up_proj",
    f"{EXPERT}down_proj",
    bias="mlp.gate.e_score_correction_bias",
    shared=(f"{SHARED}gate_proj", f"{SHARED}up_proj", f"{SHARED}down_proj"),
)
KEYS = frozenset(
    {
        "attention_bias",
        "first_k_dense_replace",
        "moe_intermediate_size",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_mtp_layers",
        "num_nextn_predict_layers",
        "routed_scaling_factor",
        "topk_group",
        "use_qk_norm",
    }
)


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; the defaults come from transformers' Glm4MoeConfig."""
    num_experts = read_num_experts(hf_config, "n_routed_experts", 128)
    width = size(hf_config, "moe_intermediate_size", 1408)
    moe = MoeShape(
        num_experts,
        experts_per_token(hf_config, num_experts, 8),
        width,
        shared_ffn_size=width * size(hf_config, "n_shared_experts", 1),
        dense_layers=leading_dense_layers(hf_config, size(hf_config, "num_hidden_layers"), 1),
        has_bias=True,
    )
    return decoder_shape(
        hf_config,
        qkv_bias=flag(hf_config, "attention_bias"),
        qk_norm=flag(hf_config, "use_qk_norm"),
        default_kv_heads=8,
        moe=moe,
    )


def _keywords(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    assert shape.moe is not None  # every model in this family has experts
    routing = read_biased_routing(hf_config, shape.moe, groups=1, kept=1, scale=1.0)
    return expert_config(shape, renormalized=True) | biased_config(shape, routing)


FAMILY = decoder_family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    shape,
    EXPERT_KEYS | KEYS,
    experts=NAMES,
    keywords=_keywords,
    defaults={"rms_norm_eps": 1e-5},  # transformers' Glm4MoeConfig
    # YaRN is not supported, because its magnitude would apply only to the rotated part of a head.
    ropes=("default",),
    rotary_share=0.5,
)
