"""Qwen3, dense: queries and keys are normalized per head; there are no biases."""

from __future__ import annotations

from hybridrl.models.families.decoder import decoder_family, decoder_shape
from hybridrl.models.families.reading import require
from hybridrl.models.family import HfConfig, ModelShape
from hybridrl.models.hf.config_keys import WINDOW_KEYS


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; transformers' defaults are a head size of 128 and 32 key-value heads."""
    require(hf_config, "attention_bias", False, (False,))
    return decoder_shape(hf_config, qk_norm=True, default_head_dim=128, default_kv_heads=32)


# Windows have no effect unless `use_sliding_window` is set, which is false by default.
FAMILY = decoder_family("qwen3", "Qwen3ForCausalLM", shape, {"attention_bias", *WINDOW_KEYS})
