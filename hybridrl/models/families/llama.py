"""Llama 2 and 3, and other models that are published as LlamaForCausalLM."""

from __future__ import annotations

from hybridrl.models.families.decoder import decoder_family, decoder_shape
from hybridrl.models.families.reading import flag, refusal
from hybridrl.models.family import HfConfig, ModelShape

BIAS_KEYS = frozenset({"attention_bias", "mlp_bias"})


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; Megatron requires biases in all linear layers or in none."""
    attention_bias, mlp_bias = (flag(hf_config, key) for key in ("attention_bias", "mlp_bias"))
    if attention_bias != mlp_bias:
        raise refusal("attention_bias", attention_bias, f"the same as mlp_bias = {mlp_bias}")
    sizes = decoder_shape(hf_config, linear_bias=attention_bias)
    if sizes.hidden_size % sizes.num_heads:  # transformers requires this even if head_dim is set
        allowed = f"a divisor of hidden_size = {sizes.hidden_size}"
        raise refusal("num_attention_heads", sizes.num_heads, allowed)
    return sizes


FAMILY = decoder_family("llama", "LlamaForCausalLM", shape, BIAS_KEYS)
