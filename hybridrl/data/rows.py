"""Reads raw rows from JSONL files and other sources. Uses neither torch nor a tokenizer.

A line that is not a JSON object, or a data set that cannot be decoded, always stops the run. A row
that can be read but not used is a bad row (`BadRows`). The command line reads every file before
ranks start, unless the same content was checked earlier. Then one rank of each node reads it again.
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
from hybridrl.errors import BadRowError, DataError, error_text, short

MAX_NAMED = 10  # maximum number of bad rows listed in a message
MAX_LEADING_BAD = 10_000  # reading stops after this many bad rows at the start of a source
_VIDEOS = ("videos", "video")
_VIDEO_ENDINGS = (".mp4", ".webm", ".mov", ".avi", ".mkv")


@dataclass(frozen=True)
class Row:
    """One row of a source.

    Args:
        place: Place shown in messages: "train.jsonl:17", or "prompts[16]" for a row in memory.
        is_arrow: Whether Arrow adds null for keys that occur only in other rows.
        number: Number of the row among all rows, usable or not.
        given: Prompt before rendering. None if it was not rendered, or if the row was split into
            several samples.
        images: Images of the prompt, in order: the bytes of a file, or its path.
    """

    place: str
    columns: Mapping[str, object]
    source: int = 0
    is_arrow: bool = False
    number: int = 0
    is_rendered: bool = False
    given: str | list[dict[str, Any]] | None = None
    images: tuple[bytes | str, ...] = ()


class BadRows:
    """Collects unusable rows and counts them by source, as `data.on_bad_row` says."""

    def __init__(self, on_bad_row: Literal["drop", "stop"]) -> None:
        self._on_bad_row = on_bad_row
        self._nums = Counter[int]()
        self._first: dict[int, list[BadRowError]] = {}

    @property
    def num(self) -> int:
        return self._nums.total()

    @property
    def stops(self) -> bool:
        return self.num > 0 and self._on_bad_row == "stop"

    def first(self) -> str:
        error = next(iter(self._first.values()))[0]
        return f"{error.name}: {error.parts()[1]}"

    def add(self, source: int, error: BadRowError) -> None:
        self._nums[source] += 1
        named = self._first.setdefault(source, [])
        if len(named) < MAX_NAMED:
            named.append(error)

    def check(self, good: Collection[int], min_rows: int = 1) -> None:
        """Raises one DataError for all bad rows if they stop the run, or if a source has only bad
        rows: at least `min_rows`, and no entry in `good`.
        """
        for source, num in self._nums.items():
            if source not in good and num >= min_rows:
                raise self._error([source], are_all=True)
        if self.stops and min_rows == 1:
            raise self._error(list(self._nums), are_all=False)

    def _error(self, sources: Sequence[int], are_all: bool) -> DataError:
        num = sum(self._nums[source] for source in sources)
        named = [error for source in sources for error in self._first[source]][:MAX_NAMED]
        (name, got, allowed, remedy), others = named[0].parts(), named[1:]
        if are_all:
            got += f"; all {num} rows are bad" if num > 1 else ""
        elif others:
            shown = "; ".join(f"{error.name}: {_shortened(error.parts()[1])}" for error in others)
            got += f". {num - 1} more rows are bad: {shown}"
            got += f"; and {num - len(named)} more" if num > len(named) else ""
        if not are_all:
            remedy += " Or set data.on_bad_row=drop to leave out and count such rows."
        return DataError(name, got, allowed, remedy)


def _shortened(text: str) -> str:
    return text if len(text) <= 120 else f"{text[:120]}..."


def raw_rows(source: Sequence[str] | Iterable[Mapping[str, object]]) -> Iterator[Row]:
    """Reads rows in order. Raises DataError with file and line if a source is unreadable."""
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
        raise DataError(
            "data.prompts", "an empty list", "at least 1 file or row", "Set data.prompts."
        )


def _set_rows(name: str) -> Iterator[Row]:
    for number, columns in enumerate(data_set_rows(name), 1):
        yield Row(f"{name}:{number}", columns, is_arrow=True)


def _file_rows(path: Path) -> Iterator[Row]:
    if not os.path.isfile(path):
        folder = path.parent
        is_folder = os.path.isdir(folder)
        files = [p.name for p in folder.iterdir() if p.is_file()] if is_folder else []
        near = get_close_matches(path.name, files, 1)
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
            str(path), "an empty file", "1 JSON object per line", "Write the prompts first."
        )


def _parse(line: bytes, place: str) -> object:
    try:
        return parse_json(line.decode("utf-8-sig").strip())
    except ValueError as error:
        shown = line[:60].decode("utf-8", "replace").strip()
        allowed = f"1 JSON object per line, in UTF-8, nested at most {MAX_DEPTH} deep"
        raise DataError(
            place, f"{shown!r} ({error_text(error)})", allowed, "Fix that line."
        ) from error


def _mapping(value: object, place: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        got = f"a {type(value).__name__}"
        raise DataError(place, got, 'a JSON object such as {"prompt": "..."}', "Fix that row.")
    return value


def refuse_videos(row: Row) -> None:
    """Raises DataError if a row has videos: training on its text alone is a different task."""
    for name in _VIDEOS:
        value = row.columns.get(name)
        if isinstance(value, str):  # only a path or a data URL refers to a video
            has_media = value.lower().endswith(_VIDEO_ENDINGS) or value.startswith("data:")
        elif isinstance(value, Sized):
            has_media = len(value) > 0
        else:
            has_media = value is not None and not isinstance(value, int | float)
        if has_media:
            got = f"a column {name} that is not empty, {short(value, 40)}"
            remedy = f"Remove such rows, or the column if the text does not need {name}."
            allowed = "rows of text and images, because videos are not supported yet"
            raise DataError(row.place, got, allowed, remedy)


def half_pair(row: Row, name: str, text: str) -> BadRowError:
    got = f"{plain(name)} = {short(text)}, with half of a surrogate pair"
    return BadRowError(row.place, got, "text that has UTF-8", "Fix that row.")
