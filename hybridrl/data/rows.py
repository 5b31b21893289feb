"""Rows of JSONL and other sources, as they stand there. No torch, no tokenizer.

Owns what a prompt file may look like; forms.py what a row may. A line that is no JSON object, or a
data set that cannot be decoded, is a damaged source and always stops a run. A row that was read and
cannot be used is a bad one (`RowError`, `BadRows`). The command line reads every file
through `forms.validate_file` before any rank starts, once for each content; one rank of each node
reads them again, if they are not tokenized yet (prompt_store.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from hybridrl.config.files import MAX_DEPTH, parse_json, plain
from hybridrl.data.sets import data_set_rows, is_data_set
from hybridrl.errors import DataError, RowError, said, short

MAX_NAMED = 10  # bad rows that a message names
MAX_BAD_AT_FIRST = 10_000  # rows of a source, all of them bad, after which no more are read
_MEDIA = ("images", "image", "videos", "video")
_MEDIA_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".mp4", ".webm")


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
        given: what its prompt was before, where it is one sample; None: as it stands.
    """

    place: str
    columns: Mapping[str, object]
    source: int = 0
    is_arrow: bool = False
    number: int = 0
    is_rendered: bool = False
    given: str | list[dict[str, Any]] | None = None


class BadRows:
    """The rows of a reading that cannot be used, counted by source.

    Args:
        on_bad_row: as of `data.on_bad_row`.
    """

    def __init__(self, on_bad_row: Literal["drop", "stop"]) -> None:
        self._on_bad_row = on_bad_row
        self._nums = Counter[int]()
        self._first: dict[int, list[RowError]] = {}

    @property
    def num(self) -> int:
        """Their number."""
        return self._nums.total()

    @property
    def stops(self) -> bool:
        """Whether there are some, and they stop the run."""
        return self.num > 0 and self._on_bad_row == "stop"

    def first(self) -> str:
        """Returns where the first of them stands, and what is wrong with it."""
        error = next(iter(self._first.values()))[0]
        return f"{error.name}: {error.parts()[1]}"

    def add(self, source: int, error: RowError) -> None:
        """Counts one."""
        self._nums[source] += 1
        named = self._first.setdefault(source, [])
        if len(named) < MAX_NAMED:
            named.append(error)

    def check(self, good: Collection[int], rows_at_least: int = 1) -> None:
        """Raises one DataError for all of them if they stop the run, or if they are all rows of a
        source.

        Args:
            good: sources with other rows.
            rows_at_least: of a source; one with fewer bad rows is not judged yet.
        """
        for source, num in self._nums.items():
            if source not in good and num >= rows_at_least:
                raise self._error([source], is_whole=True)
        if self.stops and rows_at_least == 1:
            raise self._error(list(self._nums), is_whole=False)

    def _error(self, sources: Sequence[int], is_whole: bool) -> DataError:
        """Returns the first error, and where others are: in all rows if `is_whole`."""
        num = sum(self._nums[source] for source in sources)
        named = [error for source in sources for error in self._first[source]][:MAX_NAMED]
        (name, got, allowed, remedy), others = named[0].parts(), named[1:]
        if is_whole:
            got += f", as are all {num} rows of it" if num > 1 else ""
        elif others:
            shown = "; ".join(f"{one.name}: {_cut(one.parts()[1])}" for one in others)
            got += f". {num - 1} more rows are bad: {shown}"
            got += f"; and {num - len(named)} more" if num > len(named) else ""
        if not is_whole:
            remedy += " Or set data.on_bad_row=drop, which leaves such rows out and counts them."
        return DataError(name, got, allowed, remedy)


def _cut(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:120]}..."


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


def refuse_images(row: Row) -> None:
    """Raises DataError where a row has images or videos, which no model here is given: training on
    its text alone would be another task.
    """
    for name in _MEDIA:
        value = row.columns.get(name)
        if isinstance(
            value, str
        ):  # a path; other texts say what no picture is, such as a container
            has_media = value.lower().endswith(_MEDIA_ENDINGS) or value.startswith("data:")
        elif isinstance(value, Sized):
            has_media = len(value) > 0
        else:
            has_media = value is not None and not isinstance(value, int | float)
        if has_media:
            got = f"a column {name} that is not empty, {short(value, 40)}"
            remedy = f"Leave out such rows, or the column where the text does not need {name}."
            raise DataError(row.place, got, "rows of text, for models see no images yet", remedy)


def half_pair(row: Row, name: str, text: str) -> RowError:
    """Returns the error of a text that cannot be written."""
    got = f"{plain(name)} = {short(text)}, with half of a surrogate pair"
    return RowError(row.place, got, "text that has UTF-8", "Mend that row.")
