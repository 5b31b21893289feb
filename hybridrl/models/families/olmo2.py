"""OLMo 2: norms come after attention and the feed-forward layer, none before; queries and keys are
normalised over all heads together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.reading import require
from hybridrl.models.families.rotary import rope_keywords
from hybridrl.models.family import Family, HfConfig, ModelShape, Row
from hybridrl.models.hf.config_keys import DECODER_KEYS

DEFAULTS = {"rms_norm_eps": 1e-5}  # of transformers' Olmo2Config
LOCAL, HF = "decoder.layers.{L}.", "model.layers.{L}."
BEFORE = tuple(f"{LOCAL}{name}_layernorm.weight" for name in ("input", "pre_mlp"))


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes."""
    require(hf_config, "attention_bias", False, (False,))
    return replace(decoder_shape(hf_config), norms_after="only", whole_qk_norm=True)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of TransformerConfig."""
    return decoder_config({**DEFAULTS, **hf_config}, shape(hf_config))


def rows(shape: ModelShape) -> tuple[Row, ...]:
    """Returns the weight table."""
    hidden = (shape.hidden_size,)
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norms = (
        Row(
            f"{LOCAL}self_attention.q_layernorm.weight",
            (f"{HF}self_attn.q_norm.weight",),
            ((queries,),),
            "heads",
        ),
        Row(
            f"{LOCAL}self_attention.k_layernorm.weight",
            (f"{HF}self_attn.k_norm.weight",),
            ((keys,),),
            "kv_heads",
        ),
        Row(
            f"{LOCAL}self_attention.post_layernorm.weight",
            (f"{HF}post_attention_layernorm.weight",),
            (hidden,),
            "replicated",
        ),
        Row(
            f"{LOCAL}mlp.post_layernorm.weight",
            (f"{HF}post_feedforward_layernorm.weight",),
            (hidden,),
            "replicated",
        ),
    )
    plain = tuple(row for row in decoder_rows(shape) if row.megatron not in BEFORE)
    return (*plain, *norms)


FAMILY = Family(
    "olmo2",
    ("Olmo2ForCausalLM",),
    shape,
    transformer_config,
    rope_keywords,
    rows,
    config_keys=DECODER_KEYS | {"attention_bias"},
    is_served_fused=False,
)
