"""The folder with a config.json that an engine takes for its model. No engine and no torch here."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.cache import cache_folder


@contextlib.contextmanager
def model_folder(content: Mapping[str, Any], replica: int) -> Iterator[Path]:
    """Gives a folder whose path is the same at every start of this replica with this content.

    vLLM finds what it has compiled by a key that contains the path of the model: with another path
    at each start it compiled the model and its kernels anew, 25 to 40 s. Replicas have folders, and
    so compiled files, of their own: one of the files is read while another replica may write it.

    It stands in `cache_folder("engines")` and stays; where that cannot be written, the folder is a
    temporary one.

    Args:
        content: of config.json.
        replica: number of the engine.
    """
    text = json.dumps(content, sort_keys=True)
    name = f"{hashlib.sha256(text.encode()).hexdigest()[:16]}-{replica}"
    folder = cache_folder("engines") / name
    try:
        _write(folder, text)
    except OSError:
        with tempfile.TemporaryDirectory() as temporary:
            _write(Path(temporary), text)
            yield Path(temporary)
        return
    yield folder


def _write(folder: Path, text: str) -> None:
    """Writes config.json where it is not there already; readers see all of it or none."""
    file = folder / "config.json"
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if file.read_text(encoding="utf-8") == text:
            return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"config.{os.getpid()}.new"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
