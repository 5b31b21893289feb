"""GLM-4.5, 4.6 and 4.7: grouped-query attention, a shared expert, and a router with a bias.

Rotary positions rotate half of each head. Training passes over layers for multi-token prediction.
"""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_family, decoder_shape
from hybridrl.models.families.experts import (
    BIASED_KEYS,
    BIASED_NAMES,
    biased_config,
    read_biased_moe,
)
from hybridrl.models.families.reading import flag
from hybridrl.models.family import HfConfig, ModelShape


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; the defaults come from transformers' Glm4MoeConfig."""
    return decoder_shape(
        hf_config,
        qkv_bias=flag(hf_config, "attention_bias"),
        qk_norm=flag(hf_config, "use_qk_norm"),
        default_kv_heads=8,
        moe=read_biased_moe(hf_config, 128, 8, 1408, num_dense=1),
    )


def _keywords(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    return biased_config(hf_config, shape, groups=1, kept=1, scale=1.0)


FAMILY = decoder_family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    shape,
    BIASED_KEYS | {"use_qk_norm"},
    experts=BIASED_NAMES,
    keywords=_keywords,
    defaults={"rms_norm_eps": 1e-5},  # transformers' Glm4MoeConfig
    # YaRN is not supported, because its magnitude would apply only to the rotated part of a head.
    ropes=("default",),
    rotary_share=0.5,
)
