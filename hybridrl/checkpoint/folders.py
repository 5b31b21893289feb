"""Checkpoint folders as files: which are there, which is meant, and whether one is whole.

Owns the names inside a checkpoint folder and the errors of a damaged one. No torch, so that the
command line can refuse a damaged checkpoint before any rank starts.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hybridrl.errors import CheckpointError

STEP_FOLDER = re.compile(r"step_(\d+)")
PARTIAL = ".partial"
MANIFEST = "manifest.json"
STATE = "state.json"
HF_FILES = "hf"


def step_folders(root: Path) -> dict[int, Path]:
    """Returns the complete checkpoints under `root` by step, oldest first."""
    if not root.is_dir():
        return {}
    found = ((STEP_FOLDER.fullmatch(path.name), path) for path in root.iterdir())
    return dict(sorted((int(match[1]), path) for match, path in found if match))


def newest_checkpoint(root: Path) -> Path | None:
    """Returns the newest complete checkpoint under `root`, or None."""
    folders = step_folders(root)
    return folders[max(folders)] if folders else None


def find_checkpoint(path: Path) -> Path:
    """Returns the checkpoint that `path` means: itself, or the newest of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST).is_file() or STEP_FOLDER.fullmatch(path.name):
        return path
    for root in (path, path / "checkpoints"):
        newest = newest_checkpoint(root)
        if newest is not None:
            return newest
    raise CheckpointError(
        str(path),
        "no checkpoint",
        "a run folder or a checkpoints/step_N folder",
        "Check the path, or train with checkpoint.every set.",
    )


def read_state(folder: Path) -> dict[str, Any]:
    """Checks that a checkpoint is whole and returns its `state.json`.

    Raises:
        CheckpointError: naming the file that is missing, cut short or unreadable.
    """
    remedy = f"Delete {folder} to go on from an older checkpoint."
    manifest = _read_json(folder / MANIFEST, remedy)
    for name, size in manifest.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(str(file), "missing", f"a file of {size} bytes", remedy)
        if file.stat().st_size != size:
            raise CheckpointError(
                str(file), f"{file.stat().st_size} bytes", f"{size} bytes, as written", remedy
            )
    return _read_json(folder / STATE, remedy)


def _read_json(file: Path, remedy: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(str(file), "missing", "a JSON object", remedy) from None
    except ValueError as error:
        raise CheckpointError(str(file), str(error), "a JSON object", remedy) from None
    if not isinstance(content, dict):
        raise CheckpointError(str(file), type(content).__name__, "a JSON object", remedy)
    return content
