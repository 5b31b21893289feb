"""Qwen2 and Qwen2.5: biases on the query, key and value projections."""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import (
    decoder_config,
    decoder_rows,
    decoder_shape,
    rope_keywords,
)
from hybridrl.models.family import Family, HfConfig, ModelShape


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes."""
    return decoder_shape(hf_config, qkv_bias=True)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of TransformerConfig."""
    return decoder_config(hf_config, shape(hf_config))


FAMILY = Family(
    "qwen2", ("Qwen2ForCausalLM",), shape, transformer_config, rope_keywords, decoder_rows
)
