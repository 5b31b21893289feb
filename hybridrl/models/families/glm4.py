"""GLM-4 (0414): norms before and after attention and the feed-forward layer, pairs of neighbours
turned in a part of each head; gate and up are one tensor on disk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.reading import flag, refusal
from hybridrl.models.families.rotary import read_rotary, rope_keywords
from hybridrl.models.family import Family, HfConfig, ModelShape, Row
from hybridrl.models.hf.config_keys import DECODER_KEYS

DEFAULTS = {"rms_norm_eps": 1.5625e-7, "attention_bias": True}  # of transformers' Glm4Config
# Of the sines' magnitude, which YaRN has, only the turned part of a head would have its share.
ROPES = ("default",)
DEFAULT_SHARE = 0.5  # of a head's dimensions that turn
LOCAL, HF = "decoder.layers.{L}.", "model.layers.{L}."
AFTER = {
    "self_attention.post_layernorm": "post_self_attn_layernorm",
    "mlp.post_layernorm": "post_mlp_layernorm",
}
ROPE_KEYS = ("partial_rotary_factor", "rope_parameters", "rope_scaling")


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; defaults are those of transformers' Glm4Config."""
    has_bias = flag({**DEFAULTS, **hf_config}, "attention_bias")
    plain = decoder_shape(hf_config, qkv_bias=has_bias, default_head_dim=128, default_kv_heads=2)
    return replace(plain, norms_after="also")


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of TransformerConfig."""
    found = shape(hf_config)
    rotary = read_rotary(hf_config, ROPES, DEFAULT_SHARE)
    turned = int(found.head_dim * rotary.share)
    if turned % 2 or not turned:
        allowed = f"a share of head_dim = {found.head_dim} that is an even number"
        raise refusal("partial_rotary_factor", rotary.share, allowed)
    rest = {key: value for key, value in hf_config.items() if key not in ROPE_KEYS}
    return decoder_config({**DEFAULTS, **rest}, found) | {"rotary_interleaved": True}


def model_keywords(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of GPTModel for positions."""
    return rope_keywords(hf_config, ROPES, DEFAULT_SHARE)


def rows(shape: ModelShape) -> tuple[Row, ...]:
    """Returns the weight table."""
    gate_up = (f"{HF}mlp.gate_up_proj.weight",) * 2
    found = [
        replace(row, parts=gate_up) if row.kind == "gate_up" else row for row in decoder_rows(shape)
    ]
    sizes = ((shape.hidden_size,),)
    for local, hf in AFTER.items():
        found.append(Row(f"{LOCAL}{local}.weight", (f"{HF}{hf}.weight",), sizes, "replicated"))
    return tuple(found)


FAMILY = Family(
    "glm4",
    ("Glm4ForCausalLM",),
    shape,
    transformer_config,
    model_keywords,
    rows,
    config_keys=DECODER_KEYS | {"attention_bias"},
)
