"""SmolLM3: llama-shaped, but some layers, every fourth mostly, have no positions (NoPE)."""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows
from hybridrl.models.families.llama import shape as llama_shape
from hybridrl.models.families.reading import refusal, size
from hybridrl.models.families.rotary import read_rotary, rope_keywords
from hybridrl.models.family import Family, HfConfig, ModelShape
from hybridrl.models.hf.config_keys import DECODER_KEYS, WINDOW_KEYS

# Of transformers' SmolLM3Config.
DEFAULTS = {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}
# YaRN's magnitude is in the softmax's scale here, which layers without positions have too.
ROPES = ("default", "linear", "llama3")


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes, as those of Llama."""
    return llama_shape({**DEFAULTS, **hf_config})


def _without_positions(hf_config: HfConfig) -> list[int]:
    """Returns for each layer whether it has no rotary positions, as Megatron asks for it."""
    num_layers = size(hf_config, "num_hidden_layers")
    every = size(hf_config, "no_rope_layer_interval", 4)
    has_rope = hf_config.get("no_rope_layers")  # 1 where a layer has them, despite the name
    if has_rope is None:
        return [int((layer + 1) % every == 0) for layer in range(num_layers)]
    is_list = isinstance(has_rope, list | tuple) and all(
        type(one) in (int, bool) and one in (0, 1) for one in has_rope
    )
    if not is_list or len(has_rope) != num_layers:
        raise refusal("no_rope_layers", has_rope, f"{num_layers} of 0 and 1, or null")
    return [1 - int(one) for one in has_rope]


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of TransformerConfig."""
    read_rotary(hf_config, ROPES)
    keywords = decoder_config(hf_config, shape(hf_config))
    return keywords | {"no_rope_freq": _without_positions(hf_config)}


def model_keywords(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of GPTModel for positions."""
    return rope_keywords({**DEFAULTS, **hf_config})


FAMILY = Family(
    "smollm3",
    ("SmolLM3ForCausalLM",),
    shape,
    transformer_config,
    model_keywords,
    decoder_rows,
    config_keys=DECODER_KEYS
    | {"attention_bias", "mlp_bias", "no_rope_layer_interval", "no_rope_layers", *WINDOW_KEYS},
    is_served_fused=False,
)
