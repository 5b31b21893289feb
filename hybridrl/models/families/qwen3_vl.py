"""Qwen3-VL, dense (2B to 32B): a Qwen3 decoder, with a vision tower for images.

Images are read; videos are not. Tokens have three positions (time, height, width), whose
frequencies alternate. Features of the tower's inner layers are added after the first decoder
layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config.wrapped_models import VISUAL, WRAPPER
from hybridrl.errors import MISSING
from hybridrl.models.families.decoder import decoder_family, decoder_rows, decoder_shape
from hybridrl.models.families.qwen3_5 import MROPE_KEYS, plain_positions
from hybridrl.models.families.reading import refusal, require, size
from hybridrl.models.families.rotary import rope_parameters
from hybridrl.models.family import HfConfig, ModelShape, Row
from hybridrl.models.hf.config_keys import WINDOW_KEYS
from hybridrl.models.vision.shape import PARAMETER, VisionShape

# transformers' Qwen3VLTextConfig
DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 128000, "rope_theta": 500000.0}
DEFAULT_SECTIONS = (24, 20, 20)
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
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "axial"},
}
VISION_NEUTRAL = ("model_type", "dtype", "torch_dtype", "transformers_version", "architectures")
TOKENS = {
    "image_token_id": 151655,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes of the decoder and of the vision tower."""
    require(hf_config, "attention_bias", False, (False,))
    sizes = decoder_shape(hf_config, qk_norm=True, default_head_dim=128, default_kv_heads=32)
    whole = hf_config.get(WRAPPER)
    if not isinstance(whole, Mapping):
        raise refusal("text_config", MISSING, "the file of a model with a vision tower")
    return replace(sizes, vision=_vision(whole, sizes))


def _vision(whole: HfConfig, sizes: ModelShape) -> VisionShape:
    given = whole.get("vision_config")
    if not isinstance(given, Mapping):
        raise refusal("vision_config", MISSING if given is None else given, "the tower's sizes")
    config = {
        **VISION_DEFAULTS,
        **{key: value for key, value in given.items() if value is not None},
    }
    for key in config:
        if key not in VISION_DEFAULTS and key not in VISION_NEUTRAL and not key.startswith("_"):
            raise refusal(f"vision_config.{key}", config[key], "no such key")
    for key in ("hidden_act", "rope_parameters"):
        require(config, key, None, (VISION_DEFAULTS[key],))
    if size(config, "out_hidden_size", prefix="vision_config.") != sizes.hidden_size:
        allowed = f"text_config.hidden_size = {sizes.hidden_size}"
        raise refusal("vision_config.out_hidden_size", config["out_hidden_size"], allowed)
    deep, depth = config["deepstack_visual_indexes"], size(config, "depth", prefix="vision_config.")
    is_list = isinstance(deep, list | tuple)
    if not is_list or not all(isinstance(one, int) and 0 <= one < depth for one in deep):
        raise refusal("vision_config.deepstack_visual_indexes", deep, f"layers below {depth}")
    if len(deep) > sizes.num_layers:
        allowed = f"at most one for each of the {sizes.num_layers} decoder layers"
        raise refusal("vision_config.deepstack_visual_indexes", deep, allowed)
    tokens = {key: whole.get(key, default) for key, default in TOKENS.items()}
    for key, token in tokens.items():
        if type(token) is not int or not 0 <= token < sizes.vocab_size:
            raise refusal(key, token, f"a token below vocab_size = {sizes.vocab_size}")
    return VisionShape(
        tensors=dict(_tensors(config, depth, len(deep))),
        image_token=tokens["image_token_id"],
        start_token=tokens["vision_start_token_id"],
        end_token=tokens["vision_end_token_id"],
        patch_size=size(config, "patch_size", prefix="vision_config."),
        merge_size=size(config, "spatial_merge_size", prefix="vision_config."),
        deepstack_layers=len(deep),
        config=given,
    )


def _tensors(config: HfConfig, depth: int, num_deep: int) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the name and shape of each of the tower's tensors."""

    def read(key: str) -> int:
        return size(config, key, prefix="vision_config.")

    hidden, ffn, patch = read("hidden_size"), read("intermediate_size"), read("patch_size")
    merged = hidden * read("spatial_merge_size") ** 2
    kernel = (read("in_channels"), read("temporal_patch_size"), patch, patch)
    found: list[tuple[str, tuple[int, ...]]] = [
        ("patch_embed.proj.weight", (hidden, *kernel)),
        ("patch_embed.proj.bias", (hidden,)),
        ("pos_embed.weight", (read("num_position_embeddings"), hidden)),
    ]

    def linear(name: str, outputs: int, inputs: int) -> None:
        found.extend([(f"{name}.weight", (outputs, inputs)), (f"{name}.bias", (outputs,))])

    def norm(name: str, width: int) -> None:
        found.extend([(f"{name}.weight", (width,)), (f"{name}.bias", (width,))])

    for layer in range(depth):
        block = f"blocks.{layer}"
        norm(f"{block}.norm1", hidden)
        norm(f"{block}.norm2", hidden)
        linear(f"{block}.attn.qkv", 3 * hidden, hidden)
        linear(f"{block}.attn.proj", hidden, hidden)
        linear(f"{block}.mlp.linear_fc1", ffn, hidden)
        linear(f"{block}.mlp.linear_fc2", hidden, ffn)
    for merger in ("merger", *(f"deepstack_merger_list.{i}" for i in range(num_deep))):
        norm(f"{merger}.norm", hidden if merger == "merger" else merged)
        linear(f"{merger}.linear_fc1", merged, merged)
        linear(f"{merger}.linear_fc2", read("out_hidden_size"), merged)
    return found


def rows(shape: ModelShape) -> tuple[Row, ...]:
    """Returns the weight table: the decoder's rows, and one row for each tensor of the tower."""
    vision = shape.vision
    assert vision is not None
    tower = [
        Row(f"{PARAMETER}{name}", (f"{VISUAL}{name}",), (size,), "replicated", "first")
        for name, size in vision.tensors.items()
    ]
    return (*decoder_rows(shape), *tower)


def sections(hf_config: HfConfig) -> tuple[int, int, int]:
    """Reads how many frequencies belong to time, height and width."""
    rope, key = rope_parameters(hf_config)
    given = rope.get("mrope_section", DEFAULT_SECTIONS)
    half = size(hf_config, "head_dim", 128) // 2
    is_list = isinstance(given, list | tuple) and len(given) == 3
    if not is_list or not all(type(one) is int and one > 0 for one in given) or sum(given) != half:
        raise refusal(f"{key}.mrope_section", given, f"three numbers with the sum {half}")
    if 3 * max(given[1:]) > half + 2:
        raise refusal(f"{key}.mrope_section", given, "sections that can alternate")
    if rope.get("mrope_interleaved", True) is not True:
        raise refusal(f"{key}.mrope_interleaved", rope["mrope_interleaved"], "true")
    return given[0], given[1], given[2]


def _text_keywords(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    # Fused kernels rotate by a token's index, not by its three positions.
    return {"mrope_section": [shape.head_dim // 2, 0, 0], "apply_rope_fusion": False}


def model_keywords(hf_config: HfConfig) -> dict[str, Any]:
    """Returns arguments of GPTModel: positions of three rows."""
    found = _TEXT.model_keywords(hf_config)
    rotary = replace(found["rotary"], sections=sections(hf_config))
    return found | {"rotary": rotary, "position_embedding_type": "mrope"}


def extra_inputs(hf_config: HfConfig, directory: Path | None) -> Any:
    """Returns the model's images (`ImageInputs`)."""
    from hybridrl.models.megatron.image_inputs import ImageInputs  # imports torch

    vision = FAMILY.shape(hf_config).vision
    assert vision is not None
    return ImageInputs(vision, directory)


_TEXT = decoder_family(
    "qwen3_vl",
    "Qwen3VLForConditionalGeneration",
    shape,
    {"attention_bias", *WINDOW_KEYS, *MROPE_KEYS},
    rows=rows,
    keywords=_text_keywords,
    defaults=DEFAULTS,
    ropes=("default",),
    prepare=plain_positions,
)
FAMILY = replace(_TEXT, model_keywords=model_keywords, extra_inputs=extra_inputs)
