"""Multi-head latent attention (MLA): sizes, Megatron keywords, weight rows. No torch.

DeepSeek-AI 2024, "DeepSeek-V2", section 2.1: queries and keys with values are each projected down
to a latent, normalised, and projected up to heads; a key part with rotary positions is projected
beside the latent and shared by all heads. A head's query and key are [without positions; rotary].
models/megatron/latent_attention.py computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hybridrl.models.families.reading import refusal, require, size
from hybridrl.models.families.rotary import read_rotary, rope_keywords
from hybridrl.models.family import HfConfig, LatentShape, ModelShape, Row

# Of the norms of latents: transformers and DeepSeek's own code leave it at the norm's default,
# whatever rms_norm_eps is.
LATENT_EPS = 1e-6
# Read or refused here. `head_dim` and `qk_head_dim` are sizes that transformers works out.
LATENT_KEYS = frozenset(
    {
        "head_dim",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rope_interleave",
        "v_head_dim",
    }
)
# Engines know no other.
LATENT_ROPES = ("default", "yarn")


def latent_shape(hf_config: HfConfig) -> LatentShape:
    """Reads the sizes of latents and heads; defaults are those of transformers' DeepseekV3Config.

    Raises:
        ModelError: a size is no positive integer, or differs from what follows from the others.
    """
    # Engines rotate pairs of neighbours whatever the config says.
    require(hf_config, "rope_interleave", True, (True,))
    has_query_latent = hf_config.get("q_lora_rank", 1536) is not None
    found = LatentShape(
        query_rank=size(hf_config, "q_lora_rank", 1536) if has_query_latent else 0,
        key_value_rank=size(hf_config, "kv_lora_rank", 512),
        plain_dim=size(hf_config, "qk_nope_head_dim", 128),
        rotary_dim=size(hf_config, "qk_rope_head_dim", 64),
        value_dim=size(hf_config, "v_head_dim", 128),
    )
    if found.rotary_dim % 2:
        raise refusal("qk_rope_head_dim", found.rotary_dim, "an even number")
    require(hf_config, "head_dim", found.rotary_dim, (found.rotary_dim,))
    require(hf_config, "qk_head_dim", found.query_dim, (found.query_dim,))
    return found


def latent_config(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    """Returns the keywords of Megatron's MLATransformerConfig.

    `kv_channels` is the rotary size, by which GPTModel makes its angles.
    """
    latent, rotary = _latent(shape), read_rotary(hf_config, LATENT_ROPES)
    return {
        # Of our own attention, which takes GPTModel's angles as others do.
        "multi_latent_attention": False,
        "kv_channels": latent.rotary_dim,
        "q_lora_rank": latent.query_rank or None,
        "kv_lora_rank": latent.key_value_rank,
        "qk_head_dim": latent.plain_dim,
        "qk_pos_emb_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rope_type": "rope",
        # transformers: its YaRN's magnitude for all dimensions, of queries and of keys.
        "softmax_scale": rotary.magnitude_of_all**2 / math.sqrt(latent.query_dim),
    }


def latent_rope_keywords(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of GPTModel for positions.

    Raises:
        ModelError: a scaling other than YaRN.
    """
    read_rotary(hf_config, LATENT_ROPES)
    return rope_keywords(hf_config)


def latent_rows(shape: ModelShape) -> tuple[Row, ...]:
    """Returns the weight rows of attention.

    The projections down, of queries and of keys with values, are one parameter.
    """
    latent, hidden, heads = _latent(shape), shape.hidden_size, shape.num_heads
    local, hf = "decoder.layers.{L}.self_attention.", "model.layers.{L}.self_attn."
    query = heads * latent.query_dim

    def row(name: str, parts: Mapping[str, tuple[int, ...]], kind: Any) -> Row:
        names = tuple(f"{hf}{part}.weight" for part in parts)
        return Row(f"{local}{name}.weight", names, tuple(parts.values()), kind)

    key_value = {
        "kv_a_proj_with_mqa": (latent.key_value_rank + latent.rotary_dim, hidden),
    }
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


def _latent(shape: ModelShape) -> LatentShape:
    if shape.latent is None:
        raise ValueError("the shape has no latent attention")
    return shape.latent
