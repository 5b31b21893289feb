"""Llama 2 and 3 (and models that publish themselves as LlamaForCausalLM)."""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.reading import flag, refusal
from hybridrl.models.families.rotary import rope_keywords
from hybridrl.models.family import Family, HfConfig, ModelShape
from hybridrl.models.hf.config_keys import DECODER_KEYS


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; Megatron has biases on all linear layers or on none."""
    attention_bias, mlp_bias = (flag(hf_config, key) for key in ("attention_bias", "mlp_bias"))
    if attention_bias != mlp_bias:
        raise refusal("attention_bias", attention_bias, f"the same as mlp_bias = {mlp_bias}")
    found = decoder_shape(hf_config, linear_bias=attention_bias)
    if found.hidden_size % found.num_heads:  # transformers asks for it also beside a head_dim
        allowed = f"a divisor of hidden_size = {found.hidden_size}"
        raise refusal("num_attention_heads", found.num_heads, allowed)
    return found


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of TransformerConfig."""
    return decoder_config(hf_config, shape(hf_config))


FAMILY = Family(
    "llama",
    ("LlamaForCausalLM",),
    shape,
    transformer_config,
    rope_keywords,
    decoder_rows,
    config_keys=DECODER_KEYS | {"attention_bias", "mlp_bias"},
)
