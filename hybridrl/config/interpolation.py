"""Interpolations `${...}` in a configuration: their texts and their values. No torch.

A run uses the value of `${oc.env:KEY}` but writes the text to its files, because the value may be
secret. It may continue with a changed value, such as a new API key, unless that affects training.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Path = tuple[str | int, ...]
"""Place of a value: section keys and list indices, outermost first."""

HIDDEN = "<hidden>"
_OPTIONS, _HEADERS = "options", "headers"


def interpolations(raw: object, at: Path = ()) -> dict[Path, str]:
    """Returns all texts in nested mappings and lists that contain an interpolation, by place."""
    if isinstance(raw, str):
        return {at: raw} if "${" in raw else {}
    found: dict[Path, str] = {}
    parts: Any = ()
    if isinstance(raw, Mapping):
        parts = raw.items()
    elif isinstance(raw, list | tuple):
        parts = enumerate(raw)
    for key, value in parts:
        found |= interpolations(value, (*at, key))
    return found


def leaves(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the values in nested mappings by dotted key; an empty mapping is a value."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= leaves(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def places_within(paths: Mapping[Path, str], at: Path) -> list[Path]:
    return [path for path in paths if path[: len(at)] == at]


def value_at(values: object, path: Path) -> Any:
    """Returns the value at a place in nested mappings and lists; LookupError if there is none."""
    for key in path:
        is_list = isinstance(values, list | tuple) and isinstance(key, int)
        if not is_list and not isinstance(values, Mapping):
            raise LookupError(path)
        values = values[key]  # type: ignore[index]
    return values


def as_written(values: dict[str, Any], written: Mapping[Path, str]) -> dict[str, Any]:
    """Returns a configuration to store: with `written` interpolations, and without HTTP headers."""
    kept: dict[str, Any] = _escaped(values)
    for path in _header_paths(values):
        _set(kept, path, HIDDEN)
    for path, text in written.items():
        _set(kept, path, text)
    return kept


def without_secrets(values: dict[str, Any], written: Mapping[Path, str]) -> dict[str, Any]:
    """Returns a configuration without HTTP headers and options from environment variables."""
    kept: dict[str, Any] = _copy(values)
    secret = [p for p, text in written.items() if _OPTIONS in p and "oc.env" in text]
    for path in (*_header_paths(values), *secret):
        try:
            del value_at(kept, path[:-1])[path[-1]]
        except LookupError:  # already deleted with its headers
            continue
    return kept


def shown_command(words: Sequence[str]) -> str:
    """Returns a command line for logs, with the HTTP headers in its overrides hidden."""
    return " ".join(map(_shown_word, words))


def _shown_word(word: str) -> str:
    key, sign, value = word.partition("=")
    if not sign or value.startswith("${"):  # an interpolation reveals no value
        return word
    parts = key.lstrip("+~").split(".")
    is_header = _HEADERS in parts and _OPTIONS in parts[: parts.index(_HEADERS)]
    return f"{key}={HIDDEN}" if is_header or _HEADERS in value else word


def digests(values: dict[str, Any], written: Mapping[Path, str]) -> dict[str, str]:
    """Returns a digest of each interpolated value, by dotted name. Secrets are left out."""
    known = without_secrets(values, written)
    found = {}
    for path in written:
        try:
            text = json.dumps(value_at(known, path), default=str)
        except LookupError:
            continue
        found[dotted(path)] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _header_paths(values: object, at: Path = ()) -> list[Path]:
    found: list[Path] = []
    for key, value in values.items() if isinstance(values, Mapping) else ():
        path = (*at, key)
        if path[-2:] == (_OPTIONS, _HEADERS) and isinstance(value, Mapping):
            found += [(*path, name) for name in value]
        else:
            found += _header_paths(value, path)
    return found


def _escaped(value: Any) -> Any:
    """Returns a copy with a backslash before each `${`, so that no text is interpolated."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", lambda match: 2 * match[1] + r"\${", value)
    return _copy(value, _escaped)


def _copy(value: Any, change: Callable[[Any], Any] | None = None) -> Any:
    if isinstance(value, Mapping):
        return {key: (change or _copy)(item) for key, item in value.items()}
    return [*map(change or _copy, value)] if isinstance(value, list | tuple) else value


def _set(values: dict[str, Any], path: Sequence[str | int], value: object) -> None:
    value_at(values, tuple(path[:-1]))[path[-1]] = value
