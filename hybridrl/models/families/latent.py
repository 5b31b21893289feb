"""Multi-head latent attention (MLA): sizes, Megatron keywords, weight rows. No torch.

DeepSeek-AI 2024, "DeepSeek-V2", section 2.1. Queries are projected down to a latent, normalised,
and projected up to heads; keys and values share a second latent. The rotary part of the key is
projected directly from the input, and all heads share it. A head's query and key are concatenations
of a part without positions and a rotary part. See models/megatron/latent_attention.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridrl.models.families.reading import refusal, require, size
from hybridrl.models.families.rotary import read_rotary, rope_keywords
from hybridrl.models.family import HfConfig, LatentShape, ModelShape, Row

# Epsilon in the latents' norms: transformers and DeepSeek's own code use the norm's default and
# ignore rms_norm_eps.
LATENT_EPS = 1e-6
# Keys that this module handles. transformers computes `head_dim` and `qk_head_dim` itself.
# fmt: off
LATENT_KEYS = frozenset({
    "head_dim", "kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim",
    "qk_rope_head_dim", "rope_interleave", "v_head_dim",
})
# fmt: on
LATENT_ROPES = ("default", "yarn")  # engines support only these kinds


def latent_shape(hf_config: HfConfig) -> LatentShape:
    """Reads the sizes of latents and heads; defaults come from transformers' DeepseekV3Config.

    Raises ModelError if a size is not a positive integer, or contradicts other sizes.
    """
    # Engines always rotate pairs of neighbours.
    require(hf_config, "rope_interleave", True, (True,))
    has_query_latent = hf_config.get("q_lora_rank", 1536) is not None
    sizes = LatentShape(
        query_rank=size(hf_config, "q_lora_rank", 1536) if has_query_latent else 0,
        key_value_rank=size(hf_config, "kv_lora_rank", 512),
        plain_dim=size(hf_config, "qk_nope_head_dim", 128),
        rotary_dim=size(hf_config, "qk_rope_head_dim", 64),
        value_dim=size(hf_config, "v_head_dim", 128),
    )
    if sizes.rotary_dim % 2:
        raise refusal("qk_rope_head_dim", sizes.rotary_dim, "an even number")
    require(hf_config, "head_dim", sizes.rotary_dim, (sizes.rotary_dim,))
    require(hf_config, "qk_head_dim", sizes.query_dim, (sizes.query_dim,))
    return sizes


def latent_config(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    """Returns arguments of Megatron's MLATransformerConfig.

    `kv_channels` is the size of the rotary part, because GPTModel computes its angles from it.
    """
    latent, rotary = shape.latent, read_rotary(hf_config, LATENT_ROPES)
    assert latent is not None
    return {
        "multi_latent_attention": False,  # latent_attention.py is used instead of Megatron's
        "kv_channels": latent.rotary_dim,
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "rope",
        # As in transformers, both queries and keys are scaled by YaRN's magnitude for all
        # dimensions.
        "softmax_scale": rotary.magnitude_of_all**2 / math.sqrt(latent.query_dim),
    }


def latent_rope_keywords(hf_config: HfConfig) -> dict[str, Any]:
    return rope_keywords(hf_config, LATENT_ROPES)


def latent_rows(shape: ModelShape) -> tuple[Row, ...]:
    """Returns the weight rows of attention; both down projections form one Megatron parameter."""
    latent, hidden, heads = shape.latent, shape.hidden_size, shape.num_heads
    assert latent is not None
    local, hf = "decoder.layers.{L}.self_attention.", "model.layers.{L}.self_attn."
    query = heads * latent.query_dim

    def row(name: str, parts: Mapping[str, tuple[int, ...]], kind: Any) -> Row:
        names = tuple(f"{hf}{part}.weight" for part in parts)
        return Row(f"{local}{name}.weight", names, tuple(parts.values()), kind)

    key_value = {"kv_a_proj_with_mqa": (latent.key_value_rank + latent.rotary_dim, hidden)}
    if latent.query_rank:
        down = {"q_a_proj": (latent.query_rank, hidden), **key_value}
        queries = [
            row("q_layernorm", {"q_a_layernorm": (latent.query_rank,)}, "replicated"),
            row("linear_q_up_proj", {"q_b_proj": (query, latent.query_rank)}, "heads"),
        ]
    else:
        down, queries = key_value, [row("linear_q_proj", {"q_proj": (query, hidden)}, "heads")]
    up = heads * (latent.plain_dim + latent.value_dim)
    return (
        row("linear_down_proj", down, "replicated"),
        *queries,
        row("kv_layernorm", {"kv_a_layernorm": (latent.key_value_rank,)}, "replicated"),
        row("linear_kv_up_proj", {"kv_b_proj": (up, latent.key_value_rank)}, "heads"),
        row("linear_proj", {"o_proj": (hidden, heads * latent.value_dim)}, "row"),
    )
