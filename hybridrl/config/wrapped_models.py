"""Reads the text part of multimodal models, whose config.json nests it in `text_config`.

Other modules see the text part's sizes at the top level of config.json, and the whole file under
`WRAPPER`, from which exports restore it. Qwen3.5 is trained as its text part alone, unless
`model.family` names the multimodal model; exports then also restore the prefix of the tensors'
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hybridrl.errors import MISSING, ModelError

# Key that contains the original config.json. Keys that start with "_" have no effect elsewhere.
WRAPPER, TEXT = "_wrapper", "text_config"
PREFIX, WRAPPED_PREFIX = "model.", "model.language_model."
VISUAL, SHORT_VISUAL = "model.visual.", "visual."  # prefixes of a vision tower's tensors
# Keys of a wrapper that do not describe its text part.
_OF_WRAPPER = (
    "architectures",
    "image_token_id",
    "model_type",
    "text_config",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
    "vision_token_id",
)
# Keys of the wrapper that also describe the text part.
_NOT_OF_TEXT = ("dtype", "torch_dtype", "model_type")
COMMON = ("dtype", "eos_token_id", "tie_word_embeddings", "torch_dtype", "transformers_version")


@dataclass(frozen=True)
class TextPart:
    """Names of the text part of a kind of multimodal model.

    Args:
        model_type, architecture: Entries of config.json with which the model is read.
        text_type: `model_type` of the text part in the file.
        with_images: Architecture with which the model is read if `model.family` is the wrapper's
            `model_type`; empty if `model.family` has no effect.
        has_short_names: Whether files name tensors `model.*` and `visual.*`. Published files of
            such a model have the text part's sizes at the top level of config.json.
        for_engines: Keys that engines need in the text part, with transformers' defaults.
    """

    model_type: str
    architecture: str
    text_type: str
    with_images: str = ""
    has_short_names: bool = False
    for_engines: Mapping[str, Any] = field(default_factory=dict)


# By the wrapper's model_type.
WRAPPED: Mapping[str, TextPart] = {
    "qwen2_5_vl": TextPart(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", has_short_names=True
    ),
    "qwen3_5": TextPart(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        with_images="Qwen3_5ForConditionalGeneration",
    ),
    "qwen3_5_moe": TextPart(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        with_images="Qwen3_5MoeForConditionalGeneration",
    ),
    "qwen3_vl": TextPart("qwen3_vl", "Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
    "qwen3_vl_moe": TextPart(
        "qwen3_vl_moe",
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe_text",
        for_engines={"norm_topk_prob": True},
    ),
}


def text_part(content: dict[str, Any], family: str | None = None) -> dict[str, Any]:
    """Returns the text part of a multimodal model's config.json; leaves others unchanged.

    Args:
        family: Value of `model.family`.

    Raises:
        ModelError: The text part is missing, or contradicts the rest of the file.
    """
    model_type = content.get("model_type")
    part = WRAPPED.get(model_type) if isinstance(model_type, str) else None
    if part is None or WRAPPER in content:  # or the part was read before and stored in a checkpoint
        return content
    nested = content.get(TEXT)
    if nested is None and part.has_short_names:
        nested = {key: value for key, value in content.items() if key not in _OF_WRAPPER}
    if not isinstance(nested, dict):
        raise _fault(TEXT, MISSING if nested is None else nested, "the text model's sizes")
    if nested.get("model_type", part.text_type) != part.text_type:
        raise _fault(f"{TEXT}.model_type", nested["model_type"], part.text_type)
    common = {key: content[key] for key in COMMON if content.get(key) is not None}
    ties = {one["tie_word_embeddings"] for one in (common, nested) if "tie_word_embeddings" in one}
    if len(ties) > 1:
        allowed = f"the same as {TEXT}.tie_word_embeddings"
        raise _fault("tie_word_embeddings", content["tie_word_embeddings"], allowed)
    names: dict[str, Any] = {
        "model_type": part.model_type,
        "architectures": [part.architecture],
    }
    if part.with_images and family == model_type:
        names = {"model_type": model_type, "architectures": [part.with_images]}
    return {**common, **nested, **names, WRAPPER: content}


def without_wrapper(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a text model's config.json without the rest of a multimodal model's."""
    return {key: value for key, value in content.items() if key != WRAPPER}


def wrapped(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the multimodal model's config.json with this text part, without its data type."""
    original = content[WRAPPER]
    part = WRAPPED[original["model_type"]]
    is_flat = original.get(TEXT) is None
    given = original if is_flat else original[TEXT]
    left_out = _OF_WRAPPER if is_flat else ()
    kept = [key for key in given if key in content and key not in (*_NOT_OF_TEXT, *left_out)]
    text = {key: content[key] for key in kept}
    if is_flat:
        return {**original, **text}
    return {**original, TEXT: {**text, "model_type": part.text_type}}


def wrapped_for_engines(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the multimodal model's config.json as engines need it."""
    found = wrapped(content)
    added = WRAPPED[found["model_type"]].for_engines
    if not added:
        return found
    return {**found, TEXT: {**added, **found[TEXT]}}


def has_images(content: Mapping[str, Any]) -> bool:
    """Whether hybridrl trains the model of a config.json with images, or its text part alone."""
    return WRAPPER in content and content["model_type"] == content[WRAPPER]["model_type"]


def family_with_images(content: Mapping[str, Any]) -> str | None:
    """Returns the value of `model.family` with which a text part is trained with the model's vision
    tower; None if there is none.
    """
    whole = content.get(WRAPPER)
    if whole is None or has_images(content) or not whole.get("vision_config"):
        return None
    model_type = str(whole["model_type"])
    return model_type if WRAPPED[model_type].with_images else None


def wrapped_name(name: str) -> str:
    """Returns the name of the text part's tensor in transformers' module, and in most files."""
    is_renamed = name.startswith(PREFIX) and not name.startswith(VISUAL)
    return f"{WRAPPED_PREFIX}{name.removeprefix(PREFIX)}" if is_renamed else name


def name_in_files(name: str, content: Mapping[str, Any]) -> str:
    """Returns a text part's tensor name in the files of a model with this config.json."""
    part = WRAPPED.get(content.get("model_type", ""))
    if part is None or not part.has_short_names:
        return wrapped_name(name)
    return f"{SHORT_VISUAL}{name.removeprefix(VISUAL)}" if name.startswith(VISUAL) else name


def text_name(name: str) -> str:
    """Returns the name in a weight table of a tensor with this name in a multimodal model."""
    if name.startswith(SHORT_VISUAL):
        return f"{VISUAL}{name.removeprefix(SHORT_VISUAL)}"
    is_renamed = name.startswith(WRAPPED_PREFIX)
    return f"{PREFIX}{name.removeprefix(WRAPPED_PREFIX)}" if is_renamed else name


def _fault(key: str, value: object, allowed: str) -> ModelError:
    return ModelError(f"config.json: {key}", value, allowed, "Fix the model's config.json.")
