"""Finds the model directory that a configuration names and reads its config.json. No torch.

Owns the meaning of `model.path` and `model.init`: a folder, a config.json, or a hub name
(downloaded once, then cached).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hybridrl.config.files import read_json_object
from hybridrl.config.schema import ModelConfig
from hybridrl.errors import ModelError

PLAIN_FILES = ["*.json", "*.txt", "*.model", "*.jinja"]
WEIGHT_FILES = ["*.safetensors"]


def model_directory(model: ModelConfig, *, weights: bool = True) -> Path:
    """Returns the local directory behind `model.path` or `model.init`.

    Args:
        model: the section; `init` may also name the config.json itself, whose folder is returned.
        weights: whether a hub name's weight files are wanted too; only read for `model.path`.

    Raises:
        ModelError: nothing is there, or the hub cannot give it.
    """
    key, name = ("model.path", model.path) if model.path else ("model.init", model.init)
    if name is None:
        raise ModelError("model.path", "nothing", "an HF directory, or model.init", "Set one.")
    place = Path(name).expanduser()
    if place.is_dir():
        return place
    if place.is_file() and key == "model.init":
        return place.parent
    is_hub_name = name.count("/") == 1 and not name.startswith((".", "/", "~"))
    if place.exists() or not is_hub_name:
        allowed = "an HF directory that exists or a hub name 'organisation/name'"
        raise ModelError(key, name, allowed, "Check the path.")
    return _download(key, name, weights and key == "model.path")


def read_model_config(model: ModelConfig) -> dict[str, Any]:
    """Returns the config.json that `model.path` or `model.init` names, as a dictionary.

    Raises:
        ModelError: the file is missing, damaged, or not a JSON object whose keys differ.
    """
    file = Path(model.init or "").expanduser()
    if model.init is None or not file.is_file():
        file = model_directory(model, weights=False) / "config.json"
    return read_json_object(file, ModelError)


def _download(key: str, name: str, weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = PLAIN_FILES + (WEIGHT_FILES if weights else [])
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # the hub's own errors derive from these
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            key, name, "an HF directory that exists or a hub name", f"The hub said: {reason}"
        ) from None
