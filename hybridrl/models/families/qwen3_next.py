"""Qwen3-Next (80B-A3B): gated delta nets, gated attention in every 4th layer, and experts.

The layers are those of Qwen3.5 with experts, except that some feed-forward layers may be dense, and
that a checkpoint has two input projections of a delta net, whose rows are grouped by key heads.
Engines keep this order; the trainer uses that of Qwen3.5.
"""

from __future__ import annotations

from hybridrl.models.families import qwen2_moe, qwen3_5, qwen3_5_moe
from hybridrl.models.families.decoder import decoder_family, decoder_rows
from hybridrl.models.families.experts import (
    EXPERT_KEYS,
    configured_config,
    expert_rows,
    listed_dense_layers,
)
from hybridrl.models.family import HfConfig, ModelShape, Row
from hybridrl.models.hf.config_keys import WINDOW_KEYS

# transformers' Qwen3NextConfig
DEFAULTS = qwen3_5.DEFAULTS | {
    "intermediate_size": 5632,
    "norm_topk_prob": True,
    "num_key_value_heads": 2,
}
# Windows have no effect unless `use_sliding_window` is set, which is false by default.
KEYS = qwen3_5_moe.KEYS | {"decoder_sparse_step", *WINDOW_KEYS}


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; the defaults come from transformers' Qwen3NextConfig."""
    experts = qwen3_5_moe.experts_of(hf_config, 512, 10, listed_dense_layers(hf_config))
    return qwen3_5.hybrid_shape(hf_config, moe=experts)


def rows(shape: ModelShape) -> tuple[Row, ...]:
    experts = expert_rows(shape, qwen2_moe.NAMES)
    return (*decoder_rows(shape, experts), *qwen3_5.delta_rows(shape, is_grouped=True))


FAMILY = decoder_family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    shape,
    qwen3_5.KEYS | EXPERT_KEYS | KEYS,
    rows=rows,
    keywords=configured_config,
    defaults=DEFAULTS,
    rotary_share=0.25,
)
