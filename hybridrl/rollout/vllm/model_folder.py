"""Provides the folder with the config.json that an engine loads. No engine, no torch."""

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
MAX_STARTS = (
    16  # maximum number of processes that start the same part of an engine together on one machine
)


@contextlib.contextmanager
def model_folder(content: Mapping[str, Any], replica: int, tp_rank: int) -> Iterator[Path]:
    """Provides a folder with this config.json, at the same path whenever this rank's engine starts.

    vLLM looks up compiled code by the model's path; with a new path it compiles for 25 to 40 s.
    Compiled code also depends on the tensor-parallel rank and on how this package changes the
    model, but vLLM's key contains neither. Each rank of a replica, each version of this package's
    code and each concurrent job therefore has its own folder, in `cache_folder("engines")` or, if
    that is not writable, in a temporary folder.
    """
    text = json.dumps(content, sort_keys=True).encode()
    name = hashlib.sha256(text + _code().encode()).hexdigest()[:16]
    with contextlib.ExitStack() as stack:
        try:
            place = cache_folder("engines") / f"{name}-{replica}-{tp_rank}"
            folder = _locked(place, text, stack)
            _write(folder, text)
        except OSError:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            _write(folder, text)
        yield folder


@functools.cache
def _code() -> str:
    """Returns a digest of this package's code that changes engines' models before compilation."""
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _locked(place: Path, text: bytes, stack: contextlib.ExitStack) -> Path:
    """Returns the first folder for `place` that no other process uses, locked until `stack` closes;
    without file locks, or if the folder is complete but not writable, it may be shared. Raises
    OSError if it cannot be written, or too many processes start at the same time.
    """
    for number in range(MAX_STARTS):
        folder = place if number == 0 else place.with_name(f"{place.name}-{number}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((folder / LOCK).open("ab"))
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
        # Closing the file is not enough: a forked process may also have it open.
        stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        return folder
    raise BlockingIOError(f"{MAX_STARTS} other processes are starting from {place}")


def _has(folder: Path, text: bytes) -> bool:
    with contextlib.suppress(OSError):
        return (folder / CONFIG).read_bytes() == text
    return False


def _write(folder: Path, text: bytes) -> None:
    """Writes config.json unless it exists already; readers see all of it or nothing."""
    if _has(folder, text):
        return
    number, partial = tempfile.mkstemp(dir=folder)
    with os.fdopen(number, "wb") as written:
        written.write(text)
    os.chmod(partial, 0o644)  # other users may share the cache
    os.replace(partial, folder / CONFIG)
