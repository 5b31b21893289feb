"""Qwen2.5-VL (3B to 72B): a Qwen2.5 decoder, with a vision tower for images.

Most layers of the tower attend within windows of the image. The frequencies of a token's three
positions are contiguous. Images have no duration, so `tokens_per_second` has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridrl.models.families.decoder import decoder_shape
from hybridrl.models.families.reading import refusal, require
from hybridrl.models.families.with_images import (
    ROPE,
    VISION,
    Tensors,
    family_with_images,
    layers_below,
    linear,
    patch_shape,
    vision_config,
    vision_shape,
    vision_size,
    wrapper_of,
)
from hybridrl.models.family import HfConfig, ModelShape
from hybridrl.models.vision.shape import GATE_UP

# transformers' Qwen2_5_VLTextConfig
DEFAULTS = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0}
# transformers' Qwen2_5_VLVisionConfig. Published files repeat `in_channels` and `patch_size` as
# `in_chans` and `spatial_patch_size`.
VISION_DEFAULTS = {
    "depth": 32,
    "hidden_size": 3584,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "tokens_per_second": 4,
    "window_size": 112,
    "out_hidden_size": 3584,
    "fullatt_block_indexes": (7, 15, 23, 31),
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rope_parameters": ROPE,
}
OTHER_NAMES = {"in_chans": "in_channels", "spatial_patch_size": "patch_size"}


def shape(hf_config: HfConfig) -> ModelShape:
    require(hf_config, "attention_bias", True, (True,))  # as in Qwen2.5, of three projections
    sizes = decoder_shape(hf_config, qkv_bias=True)
    if sizes.head_dim * sizes.num_heads != sizes.hidden_size:  # transformers has no `head_dim`
        allowed = f"hidden_size / num_attention_heads = {sizes.hidden_size / sizes.num_heads:g}"
        raise refusal("head_dim", sizes.head_dim, allowed)
    whole = wrapper_of(hf_config)
    defaults = VISION_DEFAULTS | {other: None for other in OTHER_NAMES}
    config = vision_config(whole, defaults, ("hidden_act", "rope_parameters"))
    for other, name in OTHER_NAMES.items():
        require(config, other, None, (None, config[name]))
        del config[other]
    whole_layers = layers_below(config, "fullatt_block_indexes")
    token_size = vision_size(config, "patch_size") * vision_size(config, "spatial_merge_size")
    window = vision_size(config, "window_size")
    if window % token_size:
        allowed = f"a multiple of patch_size * spatial_merge_size = {token_size}"
        raise refusal(f"{VISION}.window_size", window, allowed)
    vision = vision_shape(
        "qwen2_5_vl",
        whole,
        config,
        _tensors(config),
        sizes,
        windowed_layers=vision_size(config, "depth") - len(set(whole_layers)),
        window_patches=(window // vision_size(config, "patch_size")) ** 2,
    )
    return replace(sizes, vision=vision)


def _tensors(config: Mapping[str, Any]) -> Tensors:
    hidden, ffn = (vision_size(config, key) for key in ("hidden_size", "intermediate_size"))
    merged = hidden * vision_size(config, "spatial_merge_size") ** 2
    found: Tensors = {"patch_embed.proj.weight": patch_shape(config)}
    for layer in range(vision_size(config, "depth")):
        block = f"blocks.{layer}"
        found |= {f"{block}.norm1.weight": (hidden,), f"{block}.norm2.weight": (hidden,)}
        linear(found, f"{block}.attn.qkv", 3 * hidden, hidden)
        linear(found, f"{block}.attn.proj", hidden, hidden)
        linear(found, f"{block}.mlp{GATE_UP.rstrip('.')}", 2 * ffn, hidden)
        linear(found, f"{block}.mlp.down_proj", hidden, ffn)
    found["merger.ln_q.weight"] = (hidden,)
    linear(found, "merger.mlp.0", merged, merged)
    linear(found, "merger.mlp.2", vision_size(config, "out_hidden_size"), merged)
    return found


FAMILY = family_with_images(
    "qwen2_5_vl",
    "Qwen2_5_VLForConditionalGeneration",
    shape,
    DEFAULTS,
    sections=(16, 24, 24),
    do_sections_alternate=False,
)
