"""Llama 2 and 3 (and models that publish themselves as LlamaForCausalLM)."""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import (
    decoder_config,
    decoder_rows,
    decoder_shape,
    refusal,
    rope_keywords,
)
from hybridrl.models.family import Family, HfConfig, ModelShape


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; Megatron has biases on all linear layers or on none."""
    attention_bias, mlp_bias = (
        bool(hf_config.get(key, False)) for key in ("attention_bias", "mlp_bias")
    )
    if attention_bias != mlp_bias:
        raise refusal("attention_bias", attention_bias, f"the same as mlp_bias = {mlp_bias}")
    return decoder_shape(hf_config, linear_bias=attention_bias)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of TransformerConfig."""
    return decoder_config(hf_config, shape(hf_config))


FAMILY = Family(
    "llama", ("LlamaForCausalLM",), shape, transformer_config, rope_keywords, decoder_rows
)
