"""Qwen3-VL with mixtures of experts (30B-A3B, 235B-A22B): Qwen3's decoder with experts, and the
vision tower of Qwen3-VL.

Files store the experts of a layer as one tensor of transposed matrices (models/hf/expert_files.py).
"""

from __future__ import annotations

from hybridrl.models.families import qwen3_moe, qwen3_vl
from hybridrl.models.families.decoder import decoder_rows, decoder_shape
from hybridrl.models.families.experts import (
    ExpertNames,
    expert_rows,
    listed_dense_layers,
    read_moe,
    renormalized_config,
)
from hybridrl.models.families.reading import require
from hybridrl.models.families.with_images import family_with_images
from hybridrl.models.family import HfConfig, ModelShape, Row

# transformers' Qwen3VLMoeTextConfig
DEFAULTS = {
    "intermediate_size": 5632,
    "max_position_embeddings": 128000,
    "num_key_value_heads": 16,
    "rope_theta": 500000.0,
}


def shape(hf_config: HfConfig) -> ModelShape:
    require(hf_config, "attention_bias", False, (False,))
    # transformers always normalizes the weights of a token's experts.
    require(hf_config, "norm_topk_prob", True, (True,))
    moe = read_moe(hf_config, 60, 4, 1408, dense_layers=listed_dense_layers(hf_config))
    sizes = decoder_shape(hf_config, qk_norm=True, default_kv_heads=16, moe=moe)
    return qwen3_vl.with_tower(hf_config, sizes, "qwen3_vl_moe")


def _rows(shape: ModelShape) -> tuple[Row, ...]:
    return decoder_rows(shape, expert_rows(shape, ExpertNames()))


FAMILY = family_with_images(
    "qwen3_vl_moe",
    "Qwen3VLMoeForConditionalGeneration",
    shape,
    DEFAULTS,
    sections=(24, 20, 20),
    do_sections_alternate=True,
    config_keys=qwen3_moe.KEYS,
    rows=_rows,
    keywords=renormalized_config,
)
