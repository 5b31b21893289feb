"""Small files of an HF model's folder: config.json, tokenizer and generation files. No torch.

shards.py owns the tensors.
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
# Tokenizer and generation files that are copied into an exported model's folder.
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
    """Returns the content of an HF config: a directory's config.json, or the file `path`.

    Raises:
        CheckpointError: It is missing, damaged, no JSON object, or repeats a key.
    """
    file = Path(os.path.expanduser(path))
    if os.path.isdir(file):
        file = file / CONFIG_FILE
    return read_json_object(file, CheckpointError)


def write_side_files(
    directory: Path, config: Mapping[str, Any], dtype: str, side_files: Path | None
) -> None:
    """Writes config.json and copies tokenizer and generation files into an exported model's folder.

    Args:
        directory: Folder of the exported model.
        config: Content of config.json; its dtype is replaced.
        dtype: Name of the exported tensors' type, such as "bfloat16".
        side_files: Folder of the files to copy, or None.
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
    """Sets the padding token of a model with a value head in its tokenizer's files.

    The token that pads texts must be the one that transformers skips when it looks for the last
    token.
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
        saved = json.loads(file.read_text(encoding="utf-8"))
        token = saved.get("pad_token")
        if (token.get("content") if isinstance(token, dict) else token) != texts[0]:
            text = json.dumps(saved | {"pad_token": texts[0]}, indent=2, ensure_ascii=False)
            file.write_text(text + "\n", encoding="utf-8")
