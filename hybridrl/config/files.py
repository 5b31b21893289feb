"""Reading JSON that may be damaged, endless or meant to do harm, and replacing small files. No
torch.

Owns what text is refused before anything is made of it, and the errors of a model's small JSON
files: one that is missing, is no regular file, is too large or is no JSON object. A path that is a
link is followed: the hub's cache consists of links.
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
"""In a run folder: when, by how many ranks and on what a run started, and how each start ended."""
FETCH_AGAIN = "Fetch or export the file again."
# The largest of known models are 1.1 MB (tokenizer_config.json) and 20 MB (an index of weights).
MAX_BYTES = 64 << 20
# Of lists and objects in each other: what is deeper ends the recursion of whatever reads it later,
# and YAML's parser in C with the process.
MAX_DEPTH = 64
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")


def replace_text(path: Path, text: str) -> None:
    """Writes a file that readers see whole, as it was or as it is now.

    Raises:
        OSError: It cannot be written, as on a full disk; the file is as it was.
    """
    partial = path.with_name(path.name + ".new")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def parse_json(
    text: bytes | str,
    pairs: Callable[[Iterable[tuple[str, Any]]], Any] | None = None,
    *,
    allows_half_pairs: bool = False,
) -> Any:
    """Returns what JSON text says.

    Args:
        text: in UTF-8.
        pairs: as json's `object_pairs_hook`.
        allows_half_pairs: whether texts may have halves of surrogate pairs, which have no UTF-8.

    Raises:
        ValueError: it is not JSON, nested deeper than MAX_DEPTH, has a number that Python does not
            read, or half of a surrogate pair.
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
        raise ValueError("half of a surrogate pair (\\ud800 to \\udfff), which is no character")
    return found


def has_utf8(text: str) -> bool:
    """Whether a text can be written: half of a surrogate pair cannot."""
    try:
        return text.isascii() or bool(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False


def _is_deep(value: object) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [one.values() if isinstance(one, dict) else one for one in level]
        level = [part for parts in inner for part in parts if isinstance(part, dict | list)]
        if not level:
            return False
    return True


def read_json_object(
    file: Path,
    error: type[UserError],
    *,
    has_unique_keys: bool = True,
    max_bytes: int = MAX_BYTES,
) -> dict[str, Any]:
    """Returns the content of a JSON file that must hold one object.

    Args:
        file: the file, or a link to it.
        error: the class of what is raised.
        has_unique_keys: whether a key that comes twice in an object is refused.
        max_bytes: a larger file is refused unread.

    Raises:
        UserError: of class `error`; names the file.
    """
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
        raise error(
            f"{file}: {shown(twice.key)}",
            "the key twice in one object",
            "a JSON object whose keys differ",
            "Remove one of the two.",
        ) from None
    except ValueError as fault:  # of the text's encoding, or of JSON
        found = f"text that is not JSON ({fault})"
        raise error(str(file), found, "a JSON object", FETCH_AGAIN) from None
    if not isinstance(content, dict):
        raise error(str(file), type(content).__name__, "a JSON object", FETCH_AGAIN)
    return content


def read_bytes(
    file: Path, error: type[UserError], allowed: str, max_bytes: int = MAX_BYTES
) -> bytes:
    """Returns what a regular file holds.

    Raises:
        UserError: of class `error`; names the file.
    """
    num_bytes = regular_file_bytes(file, error, allowed)
    if num_bytes > max_bytes:
        found = f"a file of {num_bytes} bytes"
        raise error(str(file), found, f"{allowed} of at most {max_bytes} bytes", FETCH_AGAIN)
    try:
        return file.read_bytes()
    except OSError as fault:
        raise error(str(file), fault.strerror or fault, allowed, "Check the path.") from None


def regular_file_bytes(file: Path, error: type[UserError], allowed: str) -> int:
    """Returns the size of a regular file; a pipe or a device is never opened, which could block.

    Raises:
        UserError: of class `error`; there is no such file, or it is of another kind.
    """
    try:
        status = file.stat()
    except (OSError, ValueError) as fault:  # ValueError: a NUL in the name
        found = (fault.strerror if isinstance(fault, OSError) else None) or fault
        raise error(str(file), found, allowed, "Check the path.") from None
    if not stat.S_ISREG(status.st_mode):
        found = "a directory" if stat.S_ISDIR(status.st_mode) else "a pipe, socket or device"
        raise error(str(file), found, allowed, FETCH_AGAIN)
    return status.st_size


def shown(value: object, max_characters: int = 80) -> str:
    """Returns a value of a JSON file as JSON for a message: ASCII on one line, cut where it is
    long; what is no JSON as `short`.
    """
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return short(value, max_characters)
    return text if len(text) <= max_characters else f"{text[:max_characters]}..."


def plain(value: object, max_characters: int = 80) -> str:
    """Returns a text as it is where it is short and printable; anything else as `shown`."""
    is_plain = isinstance(value, str) and value.isprintable() and len(value) <= max_characters
    return str(value) if is_plain else shown(value, max_characters)


class _TwiceError(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key
