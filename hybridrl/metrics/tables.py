"""Tables of a run folder's samples and knobs, as services and TensorBoard show them. No torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

MAX_SAMPLES = 100  # of a step
# TensorBoard lays out the tables of all steps at once: some 10 ms for each thousand letters.
MAX_MARKDOWN_SAMPLES = 20
MAX_CELL_LETTERS = 500
Row = Mapping[str, Any]

# What Markdown or HTML would take for more than a letter.
LETTERS = {ord(letter): f"&#{ord(letter)};" for letter in "\\`*_[]<>&|!~"}


def first_samples(file: Path, most: int = MAX_SAMPLES) -> list[Row]:
    """Returns the first samples of a dump that RolloutDump wrote, so many at most."""
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in itertools.islice(lines, most)]


def column_names(rows: Iterable[Row]) -> list[str]:
    """Returns the names that any of the rows has, in the order in which they come first."""
    return list(dict.fromkeys(name for row in rows for name in row))


def written_config(folder: Path) -> dict[str, Any]:
    """Returns the run's configuration as its folder has it."""
    return dict(yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")))


def flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns values by their dotted keys."""
    found: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{key}."))
        else:
            found[f"{prefix}{key}"] = value
    return found


def markdown_table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a Markdown table that shows texts letter by letter, though spaces in a row as one:
    what looks like Markdown or HTML in them stands there as it is.

    Args:
        names: of the columns.
        rows: a value for each column; what is not a text is written as JSON. Of a text longer than
            MAX_CELL_LETTERS its beginning, its length and its end are shown.
    """
    lines = [map(_cell, names), ["---"] * len(names), *(map(_cell, row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    if len(text) > MAX_CELL_LETTERS:
        half = MAX_CELL_LETTERS // 2
        text = f"{text[:half]} ... ({len(text)} characters) ... {text[-half:]}"
    # Half of a surrogate pair has no UTF-8, in which event files are.
    text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return "<br>".join(line.translate(LETTERS) for line in text.splitlines())
