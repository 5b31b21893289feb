"""Formats samples and knobs in a run folder as tables for tracking services and TensorBoard."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

MAX_SAMPLES = 100  # Maximum number of samples per step.
# TensorBoard renders the tables of all steps together, at about 10 ms per thousand characters.
MAX_MARKDOWN_SAMPLES = 20
MAX_CELL_LETTERS = 500
Row = Mapping[str, Any]

# HTML references for characters that have a meaning in Markdown or HTML.
LETTERS = {ord(letter): f"&#{ord(letter)};" for letter in "\\`*_[]<>&|!~"}


def first_samples(file: Path, most: int = MAX_SAMPLES) -> list[Row]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in itertools.islice(lines, most)]


def column_names(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def written_config(folder: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table that shows texts literally, except for repeated spaces.

    Other values are written as JSON. A text longer than MAX_CELL_LETTERS is cut in its middle.
    """
    lines = [map(_cell, names), ["---"] * len(names), *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > MAX_CELL_LETTERS:
        half = MAX_CELL_LETTERS // 2
        text = f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"
    # Event files are UTF-8, which cannot encode half of a surrogate pair.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "<br>".join(line.translate(LETTERS) for line in text.splitlines())
