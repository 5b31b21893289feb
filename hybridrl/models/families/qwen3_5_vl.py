"""Qwen3.5 and 3.6 with images, dense and with experts: the text models' decoders, with a vision
tower.

The tower is Qwen3-VL's without features for the first decoder layers. Three positions of a token
turn a quarter of each head, and their frequencies alternate. Delta nets have no positions.
"""

from __future__ import annotations

from collections.abc import Callable

from hybridrl.models.families import qwen3_5, qwen3_5_moe, qwen3_vl
from hybridrl.models.families.experts import EXPERT_KEYS, renormalized_config
from hybridrl.models.families.with_images import family_with_images
from hybridrl.models.family import HfConfig, ModelShape

# transformers' Qwen3_5VisionConfig. Published files have an empty list for deepstack.
VISION_DEFAULTS = qwen3_vl.VISION_DEFAULTS | {"deepstack_visual_indexes": []}
FIXED = (*qwen3_vl.FIXED, "deepstack_visual_indexes")
TOKENS = {
    "image_token_id": 248056,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
SECTIONS = (11, 11, 10)


def _with_tower(
    text: Callable[[HfConfig], ModelShape], kind: str
) -> Callable[[HfConfig], ModelShape]:
    def shape(hf_config: HfConfig) -> ModelShape:
        sizes = text(hf_config)
        return qwen3_vl.with_tower(hf_config, sizes, kind, VISION_DEFAULTS, FIXED, TOKENS)

    return shape


FAMILY = family_with_images(
    "qwen3_5",
    "Qwen3_5ForConditionalGeneration",
    _with_tower(qwen3_5.shape, "qwen3_5"),
    qwen3_5.DEFAULTS,
    sections=SECTIONS,
    do_sections_alternate=True,
    config_keys=qwen3_5.KEYS,
    rows=qwen3_5.rows,
    rotary_share=0.25,
)
FAMILY_WITH_EXPERTS = family_with_images(
    "qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration",
    _with_tower(qwen3_5_moe.shape, "qwen3_5_moe"),
    qwen3_5_moe.DEFAULTS,
    sections=SECTIONS,
    do_sections_alternate=True,
    config_keys=qwen3_5.KEYS | EXPERT_KEYS | qwen3_5_moe.KEYS,
    rows=qwen3_5_moe.rows,
    keywords=renormalized_config,
    rotary_share=0.25,
)
