"""GLM-4 (0414): norms before and after both attention and the feed-forward layer.

Rotary positions rotate pairs of neighbouring dimensions in part of each head. Gate and up
projections are stored as one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from hybridrl.models.families.decoder import (
    decoder_family,
    decoder_rows,
    decoder_shape,
    fused,
    norm_row,
)
from hybridrl.models.families.reading import flag
from hybridrl.models.family import HfConfig, ModelShape, Row

FUSED = {"gate_up": "mlp.gate_up_proj"}
AFTER = {
    "self_attention.post_layernorm": "post_self_attn_layernorm",
    "mlp.post_layernorm": "post_mlp_layernorm",
}


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; the defaults come from transformers' Glm4Config."""
    has_bias = flag(hf_config, "attention_bias")
    sizes = decoder_shape(hf_config, qkv_bias=has_bias, default_head_dim=128, default_kv_heads=2)
    return replace(sizes, norms_after="also")


def rows(shape: ModelShape) -> tuple[Row, ...]:
    after = (norm_row(local, hf, shape.hidden_size) for local, hf in AFTER.items())
    return (*fused(decoder_rows(shape), FUSED), *after)


FAMILY = decoder_family(
    "glm4",
    "Glm4ForCausalLM",
    shape,
    {"attention_bias"},
    rows=rows,
    keywords=lambda hf_config, shape: {"rotary_interleaved": True},
    defaults={"rms_norm_eps": 1.5625e-7, "attention_bias": True},  # transformers' Glm4Config
    # YaRN is not supported, because its magnitude would apply only to the rotated part of a head.
    ropes=("default",),
    rotary_share=0.5,
)
