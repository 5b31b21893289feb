"""Finds the local directory of a model, downloaded from the hub at most once. No torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hybridrl.config.files import read_json_object
from hybridrl.config.hub import MODEL_FORM, PLAIN_FILES, download, model_name
from hybridrl.config.schema import ModelConfig
from hybridrl.config.wrapped_models import text_part
from hybridrl.errors import ModelError

WEIGHT_FILES = ["*.safetensors"]


def model_directory(model: ModelConfig, *, weights: bool = True) -> Path:
    """Returns the local directory of `model.path`, with or without weights, or of `model.init`.

    Raises:
        ModelError: The directory does not exist, or the hub cannot provide it.
    """
    key, name = ("model.path", model.path) if model.path else ("model.init", model.init)
    if name is None:
        raise ModelError(
            "model.path", "no value", "an HF directory, or model.init", "Set one of the two."
        )
    place = Path(os.path.expanduser(name))
    if os.path.isdir(place):
        return place
    if os.path.isfile(place) and key == "model.init":
        return place.parent
    hub_name = model_name(name)
    if hub_name is None:
        raise ModelError(key, name, MODEL_FORM, "Correct the path.")
    has_weights = weights and key == "model.path"
    return download(key, hub_name, PLAIN_FILES + (WEIGHT_FILES if has_weights else []))


def tokenizer_directory(model: ModelConfig) -> Path:
    """Returns the local directory of the tokenizer, which the hub may provide."""
    if model.tokenizer is None:
        return model_directory(model, weights=False)
    hub_name = model_name(model.tokenizer, has_organisation=False)
    if hub_name is None:
        return Path(os.path.expanduser(model.tokenizer))
    return download("model.tokenizer", hub_name, PLAIN_FILES)


def read_model_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the model's config.json, or the text part of a multimodal model (`text_part`).
    ModelError if damaged.
    """
    file = Path(os.path.expanduser(model.init or ""))
    if model.init is None or not os.path.isfile(file):
        file = model_directory(model, weights=False) / "config.json"
    return text_part(read_json_object(file, ModelError), model.family)
