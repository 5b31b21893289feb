"""Remembers of which sources the rows were checked, so that no later start reads them for that. No
torch.

A mark is a file beside the tokenized prompts (prompt_store.py), named by a digest of all that
decides whether rows are right: the sources' bytes or commits, the keys of `data`, the columns that
are looked for and the code that checks. It is written when nothing was wrong, holds its own name,
and anything else in it is no mark. Errors are never remembered.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from hybridrl.config import files
from hybridrl.config.schema import DataConfig
from hybridrl.data.prompt_store import CHECKED as ENDING
from hybridrl.data.prompt_store import prompts_folder, remove_old, what_is_read
from hybridrl.errors import UserError

_CODE = [Path(__file__), Path(files.__file__)]  # beside the code that reads


def unless_checked(
    config: DataConfig,
    names: Sequence[str],
    looked_for: Sequence[object],
    check: Callable[[], list[UserError]],
) -> list[UserError]:
    """Returns what `check` finds in the rows of sources; nothing where it found nothing before.

    Args:
        config: the keys of the columns.
        names: of the sources, as in `data.prompts`.
        looked_for: JSON; what else decides what `check` finds.
        check: reads the rows.
    """
    key, folder = _key(config, names, looked_for), prompts_folder()
    if key is not None and _is_marked(folder / f"{key}{ENDING}"):
        return []
    found = check()
    # A source that has changed meanwhile had rows of which the key says nothing.
    if not found and key is not None and _key(config, names, looked_for) == key:
        with suppress(OSError):  # the rows are read again at the next start
            _mark(folder / f"{key}{ENDING}")
    return found


def _key(config: DataConfig, names: Sequence[str], looked_for: Sequence[object]) -> str | None:
    decides = what_is_read(config, names)
    if decides is None:
        return None
    code = [hashlib.sha256(path.read_bytes()).hexdigest() for path in _CODE]
    text = json.dumps([decides, list(looked_for), code], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _is_marked(path: Path) -> bool:
    try:
        is_mark = path.read_bytes() == _content(path)
    except OSError:
        return False
    with suppress(OSError):  # of another user, or on a file system that is read only
        os.utime(path)
    return is_mark


def _mark(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    remove_old(path.parent)
    handle, name = tempfile.mkstemp(".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_content(path))
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _content(path: Path) -> bytes:
    return f"hybridrl: nothing is wrong with the rows of {path.name}\n".encode()
