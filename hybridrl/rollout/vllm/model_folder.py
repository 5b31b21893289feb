"""The folder with a config.json that an engine takes for its model. No engine and no torch here."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridrl.config.cache import cache_folder

CONFIG, LOCK = "config.json", "lock"
MOST_AT_ONCE = 16  # processes that start the same part of an engine on one machine


@contextlib.contextmanager
def model_folder(content: Mapping[str, Any], replica: int, tp_rank: int) -> Iterator[Path]:
    """Gives a folder with this config.json whose path is the same at every start of this place of
    an engine.

    vLLM finds what it has compiled by the path of the model: with another path it compiles again,
    25 to 40 s. What it has compiled knows the tensor-parallel rank of the job and this package's
    changes of the model, which the key does not contain: so each place, and each state of this
    package's code, has a folder of its own, and so have processes of several jobs at a time. It
    lies in `cache_folder("engines")`; where that cannot be written, it is temporary.
    """
    text = json.dumps(content, sort_keys=True).encode()
    name = hashlib.sha256(text + _code().encode()).hexdigest()[:16]
    with contextlib.ExitStack() as held:
        try:
            place = cache_folder("engines") / f"{name}-{replica}-{tp_rank}"
            folder = _taken(place, text, held)
            _write(folder, text)
        except OSError:
            folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
            _write(folder, text)
        yield folder


@functools.cache
def _code() -> str:
    """Returns a digest of what changes models of engines before they are compiled."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _taken(place: Path, text: bytes, held: contextlib.ExitStack) -> Path:
    """Returns the first folder of a place that no other process starts from, until `held` ends.
    Where there are no locks, or nothing can be written to a folder that is right, others may.

    Raises:
        OSError: it cannot be written, or too many start at once.
    """
    for number in range(MOST_AT_ONCE):
        folder = place if number == 0 else place.with_name(f"{place.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((folder / LOCK).open("ab"))
        except OSError:
            if _has(folder, text):
                return folder
            raise
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        except OSError:  # the file system has no locks
            return folder
        # Not by closing it alone: a process that was forked meanwhile may have it open.
        held.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        return folder
    raise BlockingIOError(f"{MOST_AT_ONCE} processes start from {place}")


def _has(folder: Path, text: bytes) -> bool:
    with contextlib.suppress(OSError):
        return (folder / CONFIG).read_bytes() == text
    return False


def _write(folder: Path, text: bytes) -> None:
    """Writes config.json where it is not there already; readers see all of it or none."""
    if _has(folder, text):
        return
    number, partial = tempfile.mkstemp(dir=folder)
    with os.fdopen(number, "wb") as written:
        written.write(text)
    os.chmod(partial, 0o644)  # others may share the cache
    os.replace(partial, folder / CONFIG)
