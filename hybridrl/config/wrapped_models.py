"""Reads the text part of multimodal models, whose config.json nests it in `text_config`.

hybridrl trains the text part: everything after this module sees a text model's config.json, which
keeps the file's content under `WRAPPER`. Exports restore the file, and the prefix of the tensors'
names. Pure data, no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybridrl.errors import MISSING, ModelError

# Key that contains the original config.json. Keys that start with "_" have no effect elsewhere.
WRAPPER, TEXT = "_wrapper", "text_config"
PREFIX, WRAPPED_PREFIX = "model.", "model.language_model."
# Keys of the wrapper that also describe the text part.
COMMON = ("dtype", "eos_token_id", "tie_word_embeddings", "torch_dtype", "transformers_version")


@dataclass(frozen=True)
class TextPart:
    """Names of the text part of a kind of multimodal model.

    Args:
        model_type, architecture: The text model's entries in config.json.
    """

    model_type: str
    architecture: str


# By the wrapper's model_type.
WRAPPED: Mapping[str, TextPart] = {"qwen3_5": TextPart("qwen3_5_text", "Qwen3_5ForCausalLM")}


def text_part(content: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a multimodal model's text part; other models' are unchanged.

    Raises:
        ModelError: The text part is missing, or contradicts the rest of the file.
    """
    model_type = content.get("model_type")
    part = WRAPPED.get(model_type) if isinstance(model_type, str) else None
    if part is None:
        return content
    nested = content.get(TEXT)
    if not isinstance(nested, dict):
        raise _fault(TEXT, MISSING if nested is None else nested, "the text model's sizes")
    if nested.get("model_type", part.model_type) != part.model_type:
        raise _fault(f"{TEXT}.model_type", nested["model_type"], part.model_type)
    common = {key: content[key] for key in COMMON if content.get(key) is not None}
    ties = {one["tie_word_embeddings"] for one in (common, nested) if "tie_word_embeddings" in one}
    if len(ties) > 1:
        allowed = f"the same as {TEXT}.tie_word_embeddings"
        raise _fault("tie_word_embeddings", content["tie_word_embeddings"], allowed)
    return {
        **common,
        **nested,
        "model_type": part.model_type,
        "architectures": [part.architecture],
        WRAPPER: content,
    }


def without_wrapper(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a text model's config.json without the rest of a multimodal model's."""
    return {key: value for key, value in content.items() if key != WRAPPER}


def wrapped(content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the multimodal model's config.json with this text part, without its data type."""
    original = content[WRAPPER]
    kept = [key for key in original[TEXT] if key in content and key not in ("dtype", "torch_dtype")]
    return {**original, TEXT: {key: content[key] for key in kept}}


def wrapped_name(name: str) -> str:
    """Returns the name of a text model's tensor in a multimodal model's files."""
    return f"{WRAPPED_PREFIX}{name.removeprefix(PREFIX)}" if name.startswith(PREFIX) else name


def _fault(key: str, value: object, allowed: str) -> ModelError:
    return ModelError(f"config.json: {key}", value, allowed, "Fix the model's config.json.")
