"""Qwen3-VL, dense (2B to 32B): a Qwen3 decoder, with a vision tower for images.

The frequencies of a token's three positions alternate. Features of the tower's inner layers are
added after the first decoder layers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from hybridrl.models.families.decoder import decoder_shape
from hybridrl.models.families.reading import refusal, require
from hybridrl.models.families.with_images import (
    ROPE,
    TOKENS,
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

# transformers' Qwen3VLTextConfig
DEFAULTS = {
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "num_key_value_heads": 32,
    "rope_theta": 500000.0,
}
# transformers' Qwen3VLVisionConfig
VISION_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "in_channels": 3,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 3584,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
    "hidden_act": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "rope_parameters": ROPE,
}
FIXED = ("hidden_act", "rope_parameters")


def shape(hf_config: HfConfig) -> ModelShape:
    require(hf_config, "attention_bias", False, (False,))
    sizes = decoder_shape(hf_config, qk_norm=True, default_head_dim=128, default_kv_heads=32)
    return with_tower(hf_config, sizes, "qwen3_vl")


def with_tower(
    hf_config: HfConfig,
    sizes: ModelShape,
    kind: str,
    defaults: Mapping[str, Any] = VISION_DEFAULTS,
    fixed: Collection[str] = FIXED,
    tokens: Mapping[str, int] = TOKENS,
) -> ModelShape:
    """Adds a tower of Qwen3-VL's kind to a decoder's sizes.

    Args:
        kind: See `VisionShape`.
        defaults, fixed: See `vision_config`.
        tokens: Ids of special tokens, if config.json does not say.
    """
    whole = wrapper_of(hf_config)
    config = vision_config(whole, defaults, fixed)
    key = "deepstack_visual_indexes"
    num_deep = len(layers_below(config, key))
    if num_deep > sizes.num_layers:
        allowed = f"at most one for each of the {sizes.num_layers} decoder layers"
        raise refusal(f"{VISION}.{key}", config[key], allowed)
    tensors = _tensors(config, num_deep)
    vision = vision_shape(kind, whole, config, tensors, sizes, tokens, deepstack_layers=num_deep)
    return replace(sizes, vision=vision)


def _tensors(config: Mapping[str, Any], num_deep: int) -> Tensors:
    hidden, ffn = (vision_size(config, key) for key in ("hidden_size", "intermediate_size"))
    merged = hidden * vision_size(config, "spatial_merge_size") ** 2
    found: Tensors = {
        "patch_embed.proj.weight": patch_shape(config),
        "patch_embed.proj.bias": (hidden,),
        "pos_embed.weight": (vision_size(config, "num_position_embeddings"), hidden),
    }

    def norm(name: str, width: int) -> None:
        found.update({f"{name}.weight": (width,), f"{name}.bias": (width,)})

    for layer in range(vision_size(config, "depth")):
        block = f"blocks.{layer}"
        norm(f"{block}.norm1", hidden)
        norm(f"{block}.norm2", hidden)
        linear(found, f"{block}.attn.qkv", 3 * hidden, hidden)
        linear(found, f"{block}.attn.proj", hidden, hidden)
        linear(found, f"{block}.mlp.linear_fc1", ffn, hidden)
        linear(found, f"{block}.mlp.linear_fc2", hidden, ffn)
    for merger in ("merger", *(f"deepstack_merger_list.{i}" for i in range(num_deep))):
        norm(f"{merger}.norm", hidden if merger == "merger" else merged)
        linear(found, f"{merger}.linear_fc1", merged, merged)
        linear(found, f"{merger}.linear_fc2", vision_size(config, "out_hidden_size"), merged)
    return found


FAMILY = family_with_images(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    shape,
    DEFAULTS,
    sections=(24, 20, 20),
    do_sections_alternate=True,
)
