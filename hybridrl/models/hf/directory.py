"""Reads and writes an HF model's small files (shards.py: the tensors). No torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.files import read_json_object
from hybridrl.config.wrapped_models import text_part
from hybridrl.errors import CheckpointError
from hybridrl.models.score_token import KEY

CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
# Tokenizer, processor and generation files that are copied to an exported model's directory.
SIDE_FILES = (
    "added_tokens.json",
    "chat_template*",
    GENERATION_FILE,
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "tokenizer*",
    "video_preprocessor_config.json",
    "vocab.*",
)


def read_config(path: str | Path, family: str | None = None) -> dict[str, Any]:
    """Returns the contents of a directory's config.json, or of its text part if multimodal.

    Args:
        family: Value of `model.family`; see `text_part`.

    Raises CheckpointError if the file is missing or damaged, is not a JSON object, or repeats a
    key.
    """
    file = Path(os.path.expanduser(path))
    if os.path.isdir(file):
        file = file / CONFIG_FILE
    return text_part(read_json_object(file, CheckpointError), family)


def write_side_files(
    directory: Path, config: Mapping[str, Any], dtype: str, side_files: Path | None
) -> None:
    """Writes config.json and copies tokenizer and generation files to an exported model.

    Args:
        config: Contents of config.json; its dtype is replaced.
    """
    written = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    written["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    text = json.dumps(written, indent=2) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
    if side_files is None:
        return
    for pattern in SIDE_FILES:
        for file in sorted(side_files.glob(pattern)):
            if file.is_file():
                shutil.copyfile(file, directory / file.name)
    if KEY in config:
        _set_padding(directory, config.get("pad_token_id"))


def copy_tokenizer(source: Path, directory: Path) -> None:
    for pattern in SIDE_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and file.name != GENERATION_FILE:
                shutil.copyfile(file, directory / file.name)


def _set_padding(directory: Path, number: int | None) -> None:
    """Sets the tokenizer's padding to the token that transformers skips to find the last token."""
    try:
        content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    texts = [one["content"] for one in content.get("added_tokens") or [] if one["id"] == number]
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = directory / name
        if not texts or not file.is_file():
            continue
        saved = json.loads(file.read_text(encoding="utf-8"))
        token = saved.get("pad_token")
        if (token.get("content") if isinstance(token, dict) else token) != texts[0]:
            text = json.dumps(saved | {"pad_token": texts[0]}, indent=2, ensure_ascii=False)
            file.write_text(text + "\n", encoding="utf-8")
