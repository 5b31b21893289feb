"""Reading and writing the small files of an HF model's folder, without torch.

Owns config.json and the copying of small files; the tensors are hf.py's.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.files import read_json_object
from hybridrl.errors import CheckpointError
from hybridrl.models.score_token import KEY

CONFIG_FILE = "config.json"
# What an exported model takes along from the model it was made of: tokenizer and generation files.
SIDE_FILES = (
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab.*",
)


def read_config(path: str | Path) -> dict[str, Any]:
    """Returns the content of an HF config: a directory's config.json, or `path` itself if a file.

    Raises:
        CheckpointError: it is missing, damaged, or not a JSON object whose keys differ.
    """
    file = Path(os.path.expanduser(path))
    if os.path.isdir(file):
        file = file / CONFIG_FILE
    return read_json_object(file, CheckpointError)


def write_side_files(
    directory: Path, config: Mapping[str, Any], dtype: str, side_files: Path | None
) -> None:
    """Writes config.json and copies tokenizer files, if any, into an exported model's folder.

    Args:
        directory: the folder being written.
        config: content of config.json; its dtype is replaced.
        dtype: name of the exported tensors' type, such as "bfloat16".
        side_files: folder whose tokenizer and generation files are copied; None: none are.
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


def _set_padding(directory: Path, number: int | None) -> None:
    """Names the padding token of a model with a value head in its tokenizer's files: what pads
    texts must be what transformers passes over as it looks for the last token.
    """
    try:
        content = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    texts = [one["content"] for one in content.get("added_tokens") or [] if one["id"] == number]
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = directory / name
        if not texts or not file.is_file():
            continue
        told = json.loads(file.read_text(encoding="utf-8"))
        named = told.get("pad_token")
        if (named.get("content") if isinstance(named, dict) else named) != texts[0]:
            told["pad_token"] = texts[0]
            file.write_text(json.dumps(told, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
