"""Rows of JSONL and other sources, as they stand there. No torch, no tokenizer.

Owns what a prompt file may look like; forms.py what a row may. The command line reads every file
through `forms.validate_file` before any rank starts, once for each content (checked_rows.py); one
rank of each node reads them again, if they are not tokenized yet (prompt_store.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from hybridrl.config.files import MAX_DEPTH, parse_json, plain
from hybridrl.data.sets import data_set_rows, is_data_set
from hybridrl.errors import DataError, said, short


@dataclass(frozen=True)
class Row:
    """One row of a source.

    Args:
        place: where it stands, "train.jsonl:17", or "prompts[16]" in memory.
        columns: as they stand there.
        source: the number of its source.
        is_arrow: Arrow stored it, which fills the keys that an object has only in other rows with
            null.
        number: among all rows that are asked for, whether or not they can be used.
        is_rendered: a chat template rendered its prompt.
    """

    place: str
    columns: Mapping[str, object]
    source: int = 0
    is_arrow: bool = False
    number: int = 0
    is_rendered: bool = False


def raw_rows(source: Sequence[str] | Iterable[Mapping[str, object]]) -> Iterator[Row]:
    """Reads rows from sources, or from memory, in order.

    Args:
        source: names as in `data.prompts`, or an iterable of mappings (a list, a
            `datasets.Dataset`).

    Raises:
        DataError: names the file and line of the first thing that is wrong.
    """
    number = -1
    is_arrow = type(source).__module__.split(".")[0] == "datasets"
    for number, item in enumerate([source] if isinstance(source, str) else source):
        if isinstance(item, str):
            is_lines = not is_data_set(item)
            rows: Iterable[Row] = _file_rows(Path(item)) if is_lines else _set_rows(item)
            yield from (replace(row, source=number) for row in rows)
        else:
            place = f"prompts[{number}]"
            yield Row(place, _mapping(item, place), is_arrow=is_arrow)
    if number < 0:
        raise DataError("data.prompts", "nothing", "1 file or row or more", "Set data.prompts.")


def _set_rows(name: str) -> Iterator[Row]:
    for number, columns in enumerate(data_set_rows(name), 1):
        yield Row(f"{name}:{number}", columns, is_arrow=True)


def _file_rows(path: Path) -> Iterator[Row]:
    if not os.path.isfile(path):
        folder = path.parent
        is_folder = os.path.isdir(folder)
        beside = [p.name for p in folder.iterdir() if p.is_file()] if is_folder else []
        near = get_close_matches(path.name, beside, 1)
        remedy = f"Did you mean {folder / near[0]}?" if near else "Check data.prompts."
        what = "a directory" if os.path.isdir(path) else "no such file"
        raise DataError(str(path), what, "a JSONL or parquet file, or a data set", remedy)
    found = False
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                found = True
                place = f"{path}:{number}"
                yield Row(place, _mapping(_parse(line, place), place))
    if not found:
        raise DataError(
            str(path), "an empty file", "1 JSON object a line", "Write the prompts first."
        )


def _parse(line: bytes, place: str) -> object:
    try:
        return parse_json(line.decode("utf-8-sig").strip())
    except ValueError as error:
        shown = line[:60].decode("utf-8", "replace").strip()
        allowed = f"1 JSON object a line, in UTF-8, nested at most {MAX_DEPTH} deep"
        raise DataError(place, f"{shown!r} ({said(error)})", allowed, "Mend that line.") from error


def _mapping(value: object, place: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        got = f"a {type(value).__name__}"
        raise DataError(place, got, 'a JSON object such as {"prompt": "..."}', "Mend that row.")
    return value


def half_pair(row: Row, name: str, text: str) -> DataError:
    """Returns the error of a text that cannot be written."""
    got = f"{plain(name)} = {short(text)}, with half of a surrogate pair"
    return DataError(row.place, got, "text that has UTF-8", "Mend that row.")
