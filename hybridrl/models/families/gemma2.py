"""Gemma 2, and code shared with Gemma 3.

Both families have norms before and after attention, and before and after the feed-forward layer.
The norms multiply by 1 + their weight. The activation is GELU. Embeddings are multiplied by the
square root of their width, and some layers have windows. Gemma 2 also applies soft caps to logits
and to products of queries and keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.reading import number, refusal, require, size
from hybridrl.models.families.rotary import rope_keywords
from hybridrl.models.family import Family, HfConfig, ModelShape, Row, Scales
from hybridrl.models.hf.config_keys import DECODER_KEYS

LOCAL, HF = "decoder.layers.{L}.", "model.layers.{L}."
WINDOWED, FULL = "sliding_attention", "full_attention"
GELU = "gelu_pytorch_tanh"
# Defaults in transformers' Gemma2Config and Gemma3TextConfig. Only Gemma 2 has defaults for the
# caps.
DEFAULTS = {
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
LARGEST_CAP = 1e6
# YaRN is not supported: its magnitude would change the softmax scale, which `query_pre_attn_scalar`
# sets.
ROPES = ("default", "linear", "llama3")
# HF names of norms. `post_attention_layernorm` follows attention here; in llama-shaped families,
# the norm with this name precedes the feed-forward layer.
NORMS = {
    "pre_mlp_layernorm": "pre_feedforward_layernorm",
    "self_attention.post_layernorm": "post_attention_layernorm",
    "mlp.post_layernorm": "post_feedforward_layernorm",
}
GEMMA_KEYS = DECODER_KEYS | {
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "hidden_activation",
    "query_pre_attn_scalar",
    "sliding_window",
}


def filled(hf_config: HfConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a config with the family's defaults for absent keys; null values are kept."""
    return {**DEFAULTS, **defaults, **hf_config}


def gemma_shape(hf_config: HfConfig, every: int, **own: Any) -> ModelShape:
    """Reads the sizes; without `layer_types`, every `every`th layer has no window."""
    require(hf_config, "hidden_activation", GELU, (GELU,))
    require(hf_config, "hidden_act", GELU, (GELU,))  # no known program reads this key
    handled = ("hidden_act", "sliding_window", "layer_types", "use_sliding_window")
    plain = {key: value for key, value in hf_config.items() if key not in handled}
    kinds = layer_kinds(hf_config, every)
    has_windows = WINDOWED in kinds
    return replace(
        decoder_shape(plain, **own),
        window=size(hf_config, "sliding_window") if has_windows else None,
        num_whole_layers=kinds.count(FULL) if has_windows else 0,
        norms_after="also",
        centered_norms=True,
        activation="gelu_tanh",
        logits_cap=cap(hf_config, "final_logit_softcapping"),
    )


def cap(hf_config: HfConfig, key: str) -> float:
    return 0.0 if hf_config.get(key) is None else number(hf_config, key, 0, 1e-3, LARGEST_CAP)


def layer_kinds(hf_config: HfConfig, every: int) -> list[str]:
    """Returns WINDOWED or FULL for each layer."""
    num_layers, kinds = size(hf_config, "num_hidden_layers"), hf_config.get("layer_types")
    if kinds is None:
        return [WINDOWED if (layer + 1) % every else FULL for layer in range(num_layers)]
    is_list = isinstance(kinds, list | tuple) and all(one in (WINDOWED, FULL) for one in kinds)
    if not is_list or len(kinds) != num_layers:
        raise refusal("layer_types", kinds, f"{num_layers} values {FULL} or {WINDOWED}, or null")
    return list(kinds)


def gemma_config(hf_config: HfConfig, shape: ModelShape, every: int) -> dict[str, Any]:
    """Returns arguments of TransformerConfig; see `gemma_shape` for the parameters."""
    scalar = number(hf_config, "query_pre_attn_scalar", 0, 1e-6, 1e9)
    # Rotary positions are left out here because `model_keywords` checks them.
    plain = {key: value for key, value in hf_config.items() if not key.startswith("rope_")}
    keywords = decoder_config(plain, shape, scalar**-0.5)
    if shape.window is not None:
        windowed = [int(kind == WINDOWED) for kind in layer_kinds(hf_config, every)]
        # Despite its name, 1 means that the layer has a window.
        keywords["window_attn_skip_freq"] = windowed
    return keywords


def embedding_scale(hf_config: HfConfig) -> Scales:
    """Returns the factor of the embeddings: the rounded square root of their width."""
    return Scales(embedding=size(hf_config, "hidden_size") ** 0.5, is_rounded=True)


def gemma_rows(shape: ModelShape) -> tuple[Row, ...]:
    named = {f"{LOCAL}{local}.weight": (f"{HF}{hf}.weight",) for local, hf in NORMS.items()}
    plain = [
        replace(row, parts=named.pop(row.megatron)) if row.megatron in named else row
        for row in decoder_rows(shape)
    ]
    sizes = ((shape.hidden_size,),)
    after = [Row(megatron, parts, sizes, "replicated") for megatron, parts in named.items()]
    return (*plain, *after)


EVERY = 2  # every second layer in Gemma 2 has no window


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; the defaults come from transformers' Gemma2Config."""
    whole = filled(hf_config, CAPS)
    bound = cap(whole, "attn_logit_softcapping")
    return replace(gemma_shape(whole, EVERY), attention_cap=bound)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    return gemma_config(filled(hf_config, CAPS), shape(hf_config), EVERY)


def model_keywords(hf_config: HfConfig) -> dict[str, Any]:
    whole = {"max_position_embeddings": 8192, **hf_config}
    return rope_keywords(whole, ROPES) | {"scales": embedding_scale(hf_config)}


FAMILY = Family(
    "gemma2",
    ("Gemma2ForCausalLM",),
    shape,
    transformer_config,
    model_keywords,
    gemma_rows,
    config_keys=GEMMA_KEYS,
)
