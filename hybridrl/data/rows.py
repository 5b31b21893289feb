"""Rows of JSONL and other sources, checked one by one. No torch, no tokenizer.

Owns what a prompt file may look like. The command line reads every file through `validate_file`
before any rank starts, once for each content (checked_rows.py); one rank of each node reads them
again through `read_rows`, if they are not tokenized yet (prompt_store.py). Invariant: a row that
comes out of here has every required column, and text in the text columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from hybridrl.config.files import MAX_DEPTH, has_utf8, parse_json, plain
from hybridrl.data.sets import data_set_rows, is_data_set
from hybridrl.errors import DataError, said, short


@dataclass(frozen=True)
class Row:
    """One row: where it stands ("train.jsonl:17", or "prompts[16]" in memory), its columns, and
    the number of its source.
    """

    place: str
    columns: Mapping[str, object]
    source: int = 0


def read_rows(
    source: Sequence[str] | Iterable[Mapping[str, object]],
    text_columns: Sequence[str],
    other_columns: Sequence[str] = (),
    chat_column: str | None = None,
) -> Iterator[Row]:
    """Reads rows from sources, or from memory, in order.

    Args:
        source: names as in `data.prompts`, or an iterable of mappings (a list, a
            `datasets.Dataset`).
        text_columns: columns that every row must have, as text that is not empty.
        other_columns: columns that every row must have, of any kind but null.
        chat_column: the one of the text columns that may hold messages instead.

    Raises:
        DataError: names the file and line of the first thing that is wrong.
    """
    listed = list(source) if not isinstance(source, str) else [source]
    if not listed:
        raise DataError("data.prompts", "nothing", "1 file or row or more", "Set data.prompts.")
    for number, item in enumerate(listed):
        if isinstance(item, str):
            is_lines = not is_data_set(item)
            rows: Iterable[Row] = _file_rows(Path(item)) if is_lines else _set_rows(item)
            rows = (replace(row, source=number) for row in rows)
        else:
            rows = [Row(f"prompts[{number}]", _mapping(item, f"prompts[{number}]"))]
        for row in rows:
            _check_columns(row, text_columns, other_columns, chat_column)
            yield row


def validate_file(
    path: str,
    text_columns: Sequence[str],
    other_columns: Sequence[str] = (),
    chat_column: str | None = None,
) -> int:
    """Reads every row of one source and returns their number; columns as in `read_rows`.

    Raises:
        DataError: names the file and line of the first thing that is wrong.
    """
    return sum(1 for _ in read_rows([path], text_columns, other_columns, chat_column))


def _set_rows(name: str) -> Iterator[Row]:
    for number, columns in enumerate(data_set_rows(name), 1):
        yield Row(f"{name}:{number}", columns)


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


def _check_columns(
    row: Row, text_columns: Sequence[str], other_columns: Sequence[str], chat_column: str | None
) -> None:
    for name in [*text_columns, *other_columns]:
        if row.columns.get(name) is None:
            present = sorted(map(str, row.columns))
            near = get_close_matches(name, present, 1)
            hint = f"Did you mean {short(near[0])}? " if near else ""
            got = f"no column {short(name)} among {short(present, 300)}"
            got = "null" if name in row.columns else got
            raise DataError(
                row.place,
                got,
                f"the column {short(name)} in every row",
                f"{hint}Add it, or set the data.*_key that names it.",
            )
    for name in text_columns:
        value = row.columns[name]
        if name == chat_column and isinstance(value, list):
            _check_messages(row, name, value)
        elif isinstance(value, str) and not has_utf8(value):
            raise _half_pair(row, name, value)
        elif not isinstance(value, str) or not value:
            got = f"{plain(name)} = {short(value)}"
            raise DataError(row.place, got, "a text that is not empty", "Mend that row.")


def _check_messages(row: Row, name: str, messages: Sequence[object]) -> None:
    for message in messages or [None]:
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            got = f"{plain(name)} has {short(message)}"
            allowed = 'a text, or messages {"role": "user", "content": "..."}'
            raise DataError(row.place, got, allowed, "Mend that row.")
        for text in message.values():
            if isinstance(text, str) and not has_utf8(text):
                raise _half_pair(row, name, text)


def _half_pair(row: Row, name: str, text: str) -> DataError:
    got = f"{plain(name)} = {short(text)}, with half of a surrogate pair"
    return DataError(row.place, got, "text that has UTF-8", "Mend that row.")
