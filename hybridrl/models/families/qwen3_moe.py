"""Qwen3 with mixtures of experts (30B-A3B, 235B-A22B): Qwen3's attention, optional dense layers."""

from __future__ import annotations

from hybridrl.models.families.decoder import decoder_family, decoder_shape
from hybridrl.models.families.experts import (
    LISTED_KEYS,
    ExpertNames,
    configured_config,
    listed_dense_layers,
    read_moe,
)
from hybridrl.models.families.reading import require
from hybridrl.models.family import HfConfig, ModelShape
from hybridrl.models.hf.config_keys import WINDOW_KEYS

# Windows have no effect unless `use_sliding_window` is set, which is false by default.
KEYS = LISTED_KEYS | {"attention_bias", *WINDOW_KEYS}


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; the defaults come from transformers' Qwen3MoeConfig."""
    require(hf_config, "attention_bias", False, (False,))
    moe = read_moe(hf_config, 128, 8, 768, dense_layers=listed_dense_layers(hf_config))
    # Unlike Qwen3Config, Qwen3MoeConfig has no default head size, so the default is hidden size /
    # heads.
    return decoder_shape(hf_config, qk_norm=True, default_kv_heads=4, moe=moe)


FAMILY = decoder_family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    shape,
    KEYS,
    experts=ExpertNames(),
    keywords=configured_config,
)
