"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from __future__ import annotations

from hybridrl.models.families.decoder import decoder_family, decoder_shape
from hybridrl.models.families.reading import require
from hybridrl.models.family import HfConfig, ModelShape
from hybridrl.models.hf.config_keys import WINDOW_KEYS


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; transformers' default is 32 key-value heads."""
    for key in ("attention_bias", "qkv_bias"):  # exactly these three projections have biases
        require(hf_config, key, True, (True,))
    return decoder_shape(hf_config, qkv_bias=True, default_kv_heads=32)


# Windows have no effect unless `use_sliding_window` is set, which is false by default.
KEYS = {"attention_bias", "qkv_bias", *WINDOW_KEYS}
FAMILY = decoder_family("qwen2", "Qwen2ForCausalLM", shape, KEYS)
