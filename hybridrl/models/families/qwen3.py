"""Qwen3, dense: queries and keys are normalised per head, no biases."""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.reading import require
from hybridrl.models.families.rotary import rope_keywords
from hybridrl.models.family import Family, HfConfig, ModelShape
from hybridrl.models.hf.config_keys import DECODER_KEYS, WINDOW_KEYS


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; a config without head size means 128, without key-value heads 32."""
    require(hf_config, "attention_bias", False, (False,))
    return decoder_shape(hf_config, qk_norm=True, default_head_dim=128, default_kv_heads=32)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of TransformerConfig."""
    return decoder_config(hf_config, shape(hf_config))


FAMILY = Family(
    "qwen3",
    ("Qwen3ForCausalLM",),
    shape,
    transformer_config,
    rope_keywords,
    decoder_rows,
    # Windows have no effect without `use_sliding_window`, which is false where it is absent.
    config_keys=DECODER_KEYS | {"attention_bias", *WINDOW_KEYS},
)
