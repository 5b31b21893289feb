"""Reads JSON that may be damaged or malicious, and replaces small files. No torch.

Links are followed, because the hub's cache consists of links.
"""

from __future__ import annotations

import json
import re
import stat
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hybridrl.errors import UserError, short

RUN_FILE = "run.json"
"""File in a run folder that records the time, ranks and hardware of each start, and how it ended.
"""
FETCH_AGAIN = "Fetch or export the file again."
# The largest known files have 1.1 MB (tokenizer_config.json) and 20 MB (weights' index).
MAX_BYTES = 64 << 20
# Maximum nesting of lists and objects. Deeper values overflow the stack of recursive readers;
# PyYAML's C parser then crashes the process.
MAX_DEPTH = 64
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def replace_text(path: Path, text: str) -> None:
    """Replaces a file; readers see the old or the new content. An OSError keeps the old one."""
    partial = path.with_name(path.name + ".new")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def parse_json(
    text: bytes | str,
    pairs: Callable[[Iterable[tuple[str, Any]]], Any] | None = None,
    *,
    allows_half_pairs: bool = False,
) -> Any:
    """Returns the content of JSON text, or of bytes in UTF-8.

    `pairs` is `object_pairs_hook` of json.loads.

    Raises:
        ValueError: The text is not JSON, is nested deeper than MAX_DEPTH, or contains an integer
            that is too long for Python or, unless allowed, an unpaired surrogate, which UTF-8
            cannot encode.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        found = json.loads(text, object_pairs_hook=pairs)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    except ValueError:
        most = sys.get_int_max_str_digits()
        raise ValueError(f"an integer of more than {most} digits") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(found):
        raise ValueError("JSON nested too deeply")
    may_have_half = not allows_half_pairs and HALF_PAIR.search(text) is not None
    if may_have_half and not has_utf8(json.dumps(found, ensure_ascii=False)):
        raise ValueError("half of a surrogate pair (\\ud800 to \\udfff), which is not a character")
    return found


def has_utf8(text: str) -> bool:
    """Whether UTF-8 can encode a text; it cannot encode unpaired surrogates."""
    try:
        return text.isascii() or bool(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False


def _is_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [part.values() if isinstance(part, dict) else part for part in level]
        level = [part for parts in inner for part in parts if isinstance(part, dict | list)]
        if not level:
            return False
    return True


def read_json_object(
    file: Path, error: type[UserError], *, has_unique_keys: bool = True, max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """Returns the JSON object in a file, by default with unique keys; raises `error` otherwise."""
    text = read_bytes(file, error, "a JSON object", max_bytes)

    def unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _TwiceError(key)
            found[key] = value
        return found

    try:
        content = parse_json(text, unique if has_unique_keys else None, allows_half_pairs=True)
    except _TwiceError as twice:
        allowed = "a JSON object with unique keys"
        remedy = "Remove one of the two entries."
        raise error(
            f"{file}: {shown(twice.key)}", "a repeated key in one object", allowed, remedy
        ) from None
    except ValueError as fault:  # wrong encoding or wrong JSON
        found = f"text that is not JSON ({fault})"
        raise error(str(file), found, "a JSON object", FETCH_AGAIN) from None
    if not isinstance(content, dict):
        raise error(str(file), type(content).__name__, "a JSON object", FETCH_AGAIN)
    return content


def read_bytes(
    file: Path, error: type[UserError], allowed: str, max_bytes: int = MAX_BYTES
) -> bytes:
    """Returns a regular file's content; raises `error` if it cannot be read or is too large."""
    num_bytes = regular_file_bytes(file, error, allowed)
    if num_bytes > max_bytes:
        found = f"a file of {num_bytes} bytes"
        raise error(str(file), found, f"{allowed} of at most {max_bytes} bytes", FETCH_AGAIN)
    try:
        return file.read_bytes()
    except OSError as fault:
        raise error(str(file), fault.strerror or fault, allowed, "Check the path.") from None


def regular_file_bytes(file: Path, error: type[UserError], allowed: str) -> int:
    """Returns a regular file's size, or raises `error`. Never opens a pipe, which could block."""
    try:
        status = file.stat()
    except (OSError, ValueError) as fault:  # ValueError if the name contains a NUL
        found = (fault.strerror if isinstance(fault, OSError) else None) or fault
        raise error(str(file), found, allowed, "Check the path.") from None
    if not stat.S_ISREG(status.st_mode):
        found = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise error(str(file), found, allowed, FETCH_AGAIN)
    return status.st_size


def shown(value: object, max_characters: int = 80) -> str:
    """Returns a value as shortened one-line ASCII JSON, or formatted by `short`, for a message."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return short(value, max_characters)
    return text if len(text) <= max_characters else f"{text[:max_characters]}..."


def plain(value: object, max_characters: int = 80) -> str:
    """Returns a short printable text unchanged; formats other values with `shown`."""
    is_plain = isinstance(value, str) and value.isprintable() and len(value) <= max_characters
    return str(value) if is_plain else shown(value, max_characters)


class _TwiceError(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key
