"""Code shared by families of Qwen's vision-language models: vision towers, positions and tokens.

Images are read; videos are not. Tokens have three positions: time, height and width. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hybridrl.config.wrapped_models import VISUAL, WRAPPER
from hybridrl.errors import MISSING
from hybridrl.models.families.decoder import decoder_family, decoder_rows
from hybridrl.models.families.qwen3_5 import MROPE_KEYS, plain_positions
from hybridrl.models.families.reading import refusal, require, size
from hybridrl.models.families.rotary import rope_parameters
from hybridrl.models.family import Family, HfConfig, ModelShape, Rotary, Row
from hybridrl.models.hf.config_keys import WINDOW_KEYS
from hybridrl.models.vision.shape import GATE_UP, PARAMETER, VisionShape

VISION = "vision_config"
NEUTRAL = {"model_type", "dtype", "torch_dtype", "transformers_version", "architectures"}
TOKENS = {"image_token_id": 151655, "vision_start_token_id": 151652, "vision_end_token_id": 151653}
ROPE = {"rope_theta": 10000.0, "rope_type": "axial"}  # in published towers
Tensors = dict[str, tuple[int, ...]]


def wrapper_of(hf_config: HfConfig) -> Mapping[str, Any]:
    """Returns the content of the multimodal model's config.json."""
    whole = hf_config.get(WRAPPER)
    if not isinstance(whole, Mapping):
        raise refusal("text_config", MISSING, "the file of a model with a vision tower")
    return whole


def vision_config(
    whole: Mapping[str, Any], defaults: Mapping[str, Any], fixed: Collection[str]
) -> dict[str, Any]:
    """Returns the tower's part of config.json, with the defaults of absent keys.

    Args:
        fixed: Keys that must have their defaults.

    Raises ModelError for a missing part, an unknown key or an unsupported value.
    """
    given = whole.get(VISION)
    if not isinstance(given, Mapping):
        raise refusal(VISION, MISSING if given is None else given, "the tower's sizes")
    config = {**defaults, **{key: value for key, value in given.items() if value is not None}}
    for key in config:
        if key not in defaults and key not in NEUTRAL and not key.startswith("_"):
            raise refusal(f"{VISION}.{key}", config[key], "no such key")
    config = {key: value for key, value in config.items() if key in defaults}
    for key in fixed:
        require(config, key, None, (defaults[key],))
    return config


def vision_size(config: Mapping[str, Any], key: str) -> int:
    return size(config, key, prefix=f"{VISION}.")


def layers_below(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    depth, found = vision_size(config, "depth"), config[key]
    is_list = isinstance(found, list | tuple)
    if not is_list or not all(type(one) is int and 0 <= one < depth for one in found):
        raise refusal(f"{VISION}.{key}", found, f"layers below {depth}")
    return tuple(found)


def vision_shape(
    kind: str,
    whole: Mapping[str, Any],
    config: Mapping[str, Any],
    tensors: Tensors,
    text: ModelShape,
    default_tokens: Mapping[str, int] = TOKENS,
    **more: int,
) -> VisionShape:
    """Returns a tower's sizes; ModelError if it does not fit the decoder or the vocabulary."""
    if vision_size(config, "out_hidden_size") != text.hidden_size:
        allowed = f"text_config.hidden_size = {text.hidden_size}"
        raise refusal(f"{VISION}.out_hidden_size", config["out_hidden_size"], allowed)
    tokens = {key: whole.get(key, default) for key, default in default_tokens.items()}
    for key, token in tokens.items():
        if type(token) is not int or not 0 <= token < text.vocab_size:
            raise refusal(key, token, f"a token below vocab_size = {text.vocab_size}")
    known = config.keys()
    return VisionShape(
        kind=kind,
        tensors=tensors,
        image_token=tokens["image_token_id"],
        start_token=tokens["vision_start_token_id"],
        end_token=tokens["vision_end_token_id"],
        patch_size=vision_size(config, "patch_size"),
        merge_size=vision_size(config, "spatial_merge_size"),
        hidden_size=vision_size(config, "hidden_size"),
        ffn_size=vision_size(config, "intermediate_size"),
        num_layers=vision_size(config, "depth"),
        config={key: value for key, value in whole[VISION].items() if key in known},
        **more,
    )


def linear(tensors: Tensors, name: str, outputs: int, inputs: int) -> None:
    tensors[f"{name}.weight"], tensors[f"{name}.bias"] = (outputs, inputs), (outputs,)


def patch_shape(config: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("hidden_size", "in_channels", "temporal_patch_size", "patch_size", "patch_size")
    return tuple(vision_size(config, key) for key in keys)


def tower_rows(shape: ModelShape) -> tuple[Row, ...]:
    vision = shape.vision
    assert vision is not None
    return tuple(_row(*one) for one in vision.tensors.items())


def _row(name: str, shape: tuple[int, ...]) -> Row:
    parts, shapes = [f"{VISUAL}{name}"], [shape]
    if GATE_UP in name:  # two tensors in files
        parts = [f"{VISUAL}{name.replace(GATE_UP, one)}" for one in (".gate_proj.", ".up_proj.")]
        shapes = [(shape[0] // 2, *shape[1:])] * 2
    return Row(f"{PARAMETER}{name}", tuple(parts), tuple(shapes), "replicated", "first")


def _sections(
    hf_config: HfConfig, default: tuple[int, int, int], can_alternate: bool, share: float
) -> tuple[int, int, int]:
    """Reads how many frequencies belong to time, height and width.

    Args:
        share: Share of each head that rotates.
    """
    rope, key = rope_parameters(hf_config)
    given = rope.get("mrope_section", default)
    heads = size(hf_config, "num_attention_heads")
    head_dim = size(hf_config, "head_dim", size(hf_config, "hidden_size") // heads)
    half = int(head_dim * share) // 2
    is_list = isinstance(given, list | tuple) and len(given) == 3
    if not is_list or not all(type(one) is int and one > 0 for one in given) or sum(given) != half:
        raise refusal(f"{key}.mrope_section", given, f"three numbers with the sum {half}")
    if can_alternate and 3 * max(given[1:]) > half + 2:
        raise refusal(f"{key}.mrope_section", given, "sections that can alternate")
    if rope.get("mrope_interleaved", can_alternate) is not can_alternate:
        allowed = str(can_alternate).lower()
        raise refusal(f"{key}.mrope_interleaved", rope["mrope_interleaved"], allowed)
    return given[0], given[1], given[2]


def family_with_images(
    name: str,
    architecture: str,
    shape: Callable[[HfConfig], ModelShape],
    defaults: Mapping[str, Any],
    sections: tuple[int, int, int],
    do_sections_alternate: bool,
    config_keys: Collection[str] = (),
    rows: Callable[[ModelShape], Sequence[Row]] = decoder_rows,
    keywords: Callable[[HfConfig, ModelShape], dict[str, Any]] = lambda *_: {},
    rotary_share: float | None = None,
) -> Family:
    """Creates the family of a llama-shaped decoder with a vision tower.

    Args:
        name, architecture, shape: See `Family`.
        defaults: Values for keys of the decoder that config.json does not contain.
        sections: Number of frequencies of time, height and width, if config.json does not say.
        do_sections_alternate: See `Rotary.has_alternating_sections`.
        config_keys, keywords, rotary_share: See `decoder_family`.
        rows: Function that returns the decoder's weight rows.
    """

    def all_rows(shape: ModelShape) -> tuple[Row, ...]:
        return (*rows(shape), *tower_rows(shape))

    def text_keywords(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
        # Megatron requires sections; rotary_positions.py sets the actual ones.
        return keywords(hf_config, shape) | {"mrope_section": [shape.head_dim // 2, 0, 0]}

    text = decoder_family(
        name,
        architecture,
        shape,
        {"attention_bias", *WINDOW_KEYS, *MROPE_KEYS, *config_keys},
        rows=all_rows,
        keywords=text_keywords,
        defaults=defaults,
        ropes=("default",),
        rotary_share=rotary_share,
        prepare=_without_sections,
    )

    def model_keywords(hf_config: HfConfig) -> dict[str, Any]:
        found = text.model_keywords(hf_config)
        rotary: Rotary = found["rotary"]
        config = _with_known_kind({**defaults, **hf_config})
        rotary = replace(
            rotary,
            sections=_sections(config, sections, do_sections_alternate, rotary.share),
            has_alternating_sections=do_sections_alternate,
        )
        return found | {"rotary": rotary, "position_embedding_type": "mrope"}

    def extra_inputs(hf_config: HfConfig, directory: Path | None) -> Any:
        from hybridrl.models.megatron.image_inputs import ImageInputs  # imports torch

        vision = text.shape(hf_config).vision
        assert vision is not None
        return ImageInputs(vision, directory)

    return replace(text, model_keywords=model_keywords, extra_inputs=extra_inputs)


def _without_sections(hf_config: HfConfig) -> HfConfig:
    return plain_positions(_with_known_kind(hf_config))


def _with_known_kind(hf_config: HfConfig) -> dict[str, Any]:
    """Returns a config whose kind of positions is "default", which old files call "mrope"."""
    found = dict(hf_config)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := found.get(key), Mapping):
            kinds = {name: "default" for name in ("rope_type", "type") if rope.get(name) == "mrope"}
            found[key] = {**rope, **kinds}
    return found
