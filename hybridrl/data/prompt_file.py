"""Tokenized prompts in a file that processes map: written once, read by all ranks of a node. No
torch.

Owns the format. A file holds sections of numbers and text, then a footer of JSON that says where
each section stands, then the footer's length, its CRC-32 and MAGIC. Rows of tokens, texts,
columns and prompts as rows gave them stand one after the other; a section of offsets (int64, one
more than rows) says where each ends. Columns and given prompts are JSON. Invariant: `MappedPrompts`
gives prompts equal to those that were written, or the file is refused: nothing of it is used before
its sizes fit, and `verify` reads it whole.
Tokens are mapped; texts and columns are read where a prompt is asked for.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import struct
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np
from numpy.typing import NDArray

from hybridrl.contracts.prompts import Prompt
from hybridrl.data.tuple_texts import TupleTexts, runs

MAGIC = b"hybridrl prompts 3\n"
_TRAILER = struct.Struct("=QI")  # the footer's length and CRC-32
_MOST_FOOTER_BYTES = 1 << 20
_COPIED_AT_ONCE = 1 << 20
_ALIGNMENT = 64
NONE = b"None"  # the text of tokens that a prompt has not
NO_GAPS = b"()()"
_GIVEN = ("tokens", "response", "rejected")
_GAPS = ("response_gaps", "rejected_gaps")
_NUMBERS = (*_GIVEN, *_GAPS)
_TEXTS = ("text", "columns", "given")
_RAGGED = {**dict.fromkeys(_NUMBERS, 4), **dict.fromkeys(_TEXTS, 1)}  # bytes of an item
_ENDS = {name: f"{name}_offsets" for name in _RAGGED}
_TYPES = {
    "ids": "i8",
    "sources": "i4",
    "labels": "i1",  # of `columns["label"]`: 1 true, 0 false, -1 anything else
    **dict.fromkeys(_NUMBERS, "i4"),
    **dict.fromkeys(_TEXTS, "u1"),
    **dict.fromkeys(_ENDS.values(), "i8"),
}

_ROWS_AT_ONCE, _NUMBERS_AT_ONCE = 1 << 12, 1 << 17  # of which the texts of identities are made

Identity = tuple[int, bytes, bytes, bytes, bytes, bool | None]


class NotHeldError(Exception):
    """A prompt has what the file cannot hold: a column that is no JSON, a number of a token beyond
    32 bits.
    """


class DamagedError(Exception):
    """A file that is not what was written."""


def identities(prompts: Sequence[Prompt]) -> Iterator[Identity]:
    """Yields of each prompt its number, its tokens, its response's and its rejected ones, these
    three as the text of a tuple or NONE, the texts of the gaps in both, NO_GAPS where there are
    none, and its label where that is true or false: what its data's identity is made of.
    """
    if isinstance(prompts, MappedPrompts):
        yield from prompts.identities()
        return
    for prompt in prompts:
        label = prompt.columns.get("label")
        known = label if isinstance(label, bool) else None
        given = prompt.tokens, prompt.response_tokens, prompt.rejected_tokens
        tokens, response, rejected = (str(some).encode() for some in given)
        gaps = f"{prompt.response_gaps}{prompt.rejected_gaps}".encode()
        yield prompt.prompt_id, tokens, response, rejected, gaps, known


def token_texts(prompts: Sequence[Prompt]) -> Iterator[tuple[int, bytes]]:
    """Yields of each prompt its number, and its tokens as the text of a tuple."""
    if isinstance(prompts, MappedPrompts):
        ids = prompts.file.ids
        yield from ((int(ids[row]), tokens) for row, (tokens,) in prompts.texts(1))
        return
    yield from ((prompt.prompt_id, str(prompt.tokens).encode()) for prompt in prompts)


def chosen(prompts: Sequence[Prompt], places: Sequence[int]) -> Sequence[Prompt]:
    """Returns the prompts at these places."""
    if isinstance(prompts, MappedPrompts):
        return prompts.chosen(places)
    return tuple(prompts[place] for place in places)


def write_prompts(
    file: BinaryIO,
    folder: Path,
    prompts: Iterable[tuple[Prompt, int]],
    about: Mapping[str, object],
) -> None:
    """Writes prompts with the numbers of their sources.

    Args:
        file: empty.
        folder: for files without a name, in which rows stand until all have come.
        prompts: either all with a response or none, and so of rejected ones.
        about: JSON that `MappedPrompts.about` gives back; asked for after the last prompt.

    Raises:
        NotHeldError: the file cannot hold one of them.
        OSError: of the files that are written.
    """
    with _Sections(folder) as sections:
        for prompt, source in prompts:
            sections.add(prompt, source)
        out = _Summed(file)
        places = {name: out.section(parts) for name, parts in sections.parts()}
        footer = {
            "num": len(sections.ids),
            "sections": places,
            "has": sections.has,
            "largest_token": sections.largest,
            "crc": out.crc,
            "about": about,
        }
    text = json.dumps(footer).encode()
    if len(text) > _MOST_FOOTER_BYTES:
        raise NotHeldError("too much is said about the prompts")
    file.write(text + _TRAILER.pack(len(text), zlib.crc32(text)) + MAGIC)
    file.flush()


class _Sections:
    """The sections of a file while its prompts come."""

    def __init__(self, folder: Path) -> None:
        self.ids, self.sources, self.labels = array("q"), array("i"), array("b")
        self.has: list[bool] | None = None
        self.largest = -1
        with ExitStack() as opened:
            self._parts = {
                name: opened.enter_context(tempfile.TemporaryFile(dir=folder)) for name in _RAGGED
            }
            self._opened = opened.pop_all()
        self._ends = {name: array("q", [0]) for name in _RAGGED}

    def __enter__(self) -> _Sections:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def add(self, prompt: Prompt, source: int) -> None:
        """Takes in one prompt."""
        given = prompt.tokens, prompt.response_tokens, prompt.rejected_tokens
        has = [tokens is not None for tokens in given]
        self.has = has if self.has is None else self.has
        assert has == self.has, "prompts with and without responses"
        columns = dict(prompt.columns)
        if not _is_json(columns) or not _is_json(prompt.given):
            raise NotHeldError("a column that is not of JSON's types")
        try:
            gaps = prompt.response_gaps, prompt.rejected_gaps
            numbers = [array("i", some or ()) for some in (*given, *gaps)]
        except (OverflowError, TypeError) as error:
            raise NotHeldError(f"a token that is no number of 32 bits ({error})") from error
        self.largest = max(self.largest, *(max(some, default=-1) for some in numbers[:3]))
        own = "" if prompt.given is None else json.dumps(prompt.given, ensure_ascii=False)
        texts = prompt.text, json.dumps(columns, ensure_ascii=False), own
        parts = [some.tobytes() for some in numbers]
        parts += [text.encode("utf-8", "surrogatepass") for text in texts]
        for (name, size), part in zip(_RAGGED.items(), parts, strict=True):
            self._parts[name].write(part)
            self._ends[name].append(self._ends[name][-1] + len(part) // size)
        self.ids.append(prompt.prompt_id)
        self.sources.append(source)
        label = columns.get("label")
        self.labels.append(int(label) if isinstance(label, bool) else -1)

    def parts(self) -> Iterator[tuple[str, Iterable[bytes]]]:
        """Yields each section's name and content."""
        for name, column in (("ids", self.ids), ("sources", self.sources), ("labels", self.labels)):
            yield name, [column.tobytes()]
        for name, file in self._parts.items():
            file.seek(0)
            yield name, iter(partial(file.read, _COPIED_AT_ONCE), b"")
            file.truncate(0)
            yield _ENDS[name], [self._ends[name].tobytes()]


class _Summed:
    """Writes sections, and sums up what was written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size, self.crc = file, 0, 0

    def section(self, parts: Iterable[bytes]) -> list[int]:
        """Writes one section and returns where it stands and its bytes."""
        self._write(bytes(-self._size % _ALIGNMENT))
        start = self._size
        for part in parts:
            self._write(part)
        return [start, self._size - start]

    def _write(self, part: bytes) -> None:
        self._file.write(part)
        self._size += len(part)
        self.crc = zlib.crc32(part, self.crc)


def _is_json(value: object) -> bool:
    """Whether JSON gives a value back as it is, types included."""
    kind = type(value)
    if kind is dict:
        return all(type(k) is str and _is_json(v) for k, v in value.items())  # type: ignore[attr-defined]
    if kind is list:
        return all(map(_is_json, value))  # type: ignore[call-overload]
    return value is None or kind in (str, int, float, bool)


class PromptFile:
    """A file of prompts that is mapped.

    Args:
        path: of a file of `write_prompts`.

    Attributes:
        about: what `write_prompts` was told.
        num: of prompts.
        num_bytes: of the file.
        largest_token: of all.

    Raises:
        DamagedError: its sizes do not fit together.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        # Without O_NONBLOCK a pipe of that name would be waited for.
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            self._read_footer()
        except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
            raise DamagedError(f"a footer that says nothing ({error})") from error

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def _read_footer(self) -> None:
        status = os.fstat(self._fd)
        size, tail = status.st_size, _TRAILER.size + len(MAGIC)
        if not stat.S_ISREG(status.st_mode) or size < tail:
            raise DamagedError("no regular file, or one that is cut short")
        end = os.pread(self._fd, tail, size - tail)
        length, crc = _TRAILER.unpack(end[: _TRAILER.size])
        if end[_TRAILER.size :] != MAGIC or not 0 < length <= min(size - tail, _MOST_FOOTER_BYTES):
            raise DamagedError("an end that is not that of such a file")
        text = os.pread(self._fd, length, size - tail - length)
        if zlib.crc32(text) != crc:
            raise DamagedError("a damaged footer")
        footer = json.loads(text)
        self._content_bytes, self._crc = size - tail - length, int(footer["crc"])
        self.num_bytes, self.num, self.about = size, int(footer["num"]), dict(footer["about"])
        self.largest_token = int(footer["largest_token"])
        self.has = tuple(map(bool, footer["has"]))
        self._places = {name: self._place(name, footer["sections"][name]) for name in _TYPES}
        if self.num < 1 or len(self.has) != 3:
            raise DamagedError("a footer without prompts")
        self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        rows = ("ids", "sources", "labels")
        self.ids, self.sources, self.labels = (self._array(name, self.num) for name in rows)
        self.offsets = {name: self._array(end, self.num + 1) for name, end in _ENDS.items()}
        self.tokens = [self._array(name) for name in _GIVEN]
        self.gaps = [self._array(name) for name in _GAPS]

    def _place(self, name: str, place: Any) -> tuple[int, int]:
        start, num_bytes = map(int, place)
        fits = 0 <= start <= start + num_bytes <= self._content_bytes
        if not fits or start % _ALIGNMENT or num_bytes % np.dtype(_TYPES[name]).itemsize:
            raise DamagedError(f"a section {name} beyond the file")
        return start, num_bytes

    def _array(self, name: str, num: int | None = None) -> NDArray[Any]:
        (start, num_bytes), kind = self._places[name], np.dtype(_TYPES[name])
        if num is not None and num * kind.itemsize != num_bytes:
            raise DamagedError(f"{num_bytes} bytes in the section {name}")
        return np.frombuffer(self._map, kind, num_bytes // kind.itemsize, start)

    def verify(self) -> None:
        """Reads the whole file.

        Raises:
            DamagedError: it is not what was written.
        """
        crc, start = 0, 0
        while start < self._content_bytes:
            size = min(_COPIED_AT_ONCE, self._content_bytes - start)
            part = os.pread(self._fd, size, start)
            if not part:
                break
            crc, start = zlib.crc32(part, crc), start + len(part)
        if crc != self._crc:
            raise DamagedError("content that does not fit its sum")
        for name, ends in self.offsets.items():
            _, num_bytes = self._places[name]
            last = num_bytes // _RAGGED[name]
            if ends[0] != 0 or ends[-1] != last or bool((np.diff(ends) < 0).any()):
                raise DamagedError(f"offsets of {name} that do not ascend")

    def text(self, name: str, row: int) -> str:
        """Returns one row of the section `text`, `columns` or `given`.

        Raises:
            DamagedError: the file has become shorter.
        """
        start, end = self.offsets[name][row : row + 2].tolist()
        part = os.pread(self._fd, end - start, self._places[name][0] + start)
        if len(part) != end - start:
            raise DamagedError(f"{name} of prompt {row}: the file was cut short")
        return part.decode("utf-8", "surrogatepass")

    def tokens_of(self, row: int) -> list[tuple[int, ...] | None]:
        """Returns the tokens of a prompt, of its response and its rejected one."""
        found: list[tuple[int, ...] | None] = []
        for name, has, tokens in zip(_GIVEN, self.has, self.tokens, strict=True):
            start, end = self.offsets[name][row : row + 2].tolist() if has else (0, 0)
            found.append(tuple(tokens[start:end].tolist()) if has else None)
        return found

    def gaps_of(self, row: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the gaps of a prompt's response and of its rejected one."""
        first, second = (
            tuple(gaps[slice(*self.offsets[name][row : row + 2].tolist())].tolist())
            for name, gaps in zip(_GAPS, self.gaps, strict=True)
        )
        return first, second


class MappedPrompts(Sequence[Prompt]):
    """The prompts of a file, or some of them; each is made when it is asked for.

    Args:
        file: that has them.
        rows: which, in which order; None: all.
    """

    def __init__(self, file: PromptFile, rows: NDArray[np.int64] | range | None = None) -> None:
        self.file = file
        self._rows = range(file.num) if rows is None else rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> MappedPrompts: ...
    def __getitem__(self, place: int | slice) -> Prompt | MappedPrompts:
        if isinstance(place, slice):
            return MappedPrompts(self.file, self._rows[place])
        row = int(self._rows[place])
        tokens, response, rejected = self.file.tokens_of(row)
        assert tokens is not None
        columns = json.loads(self.file.text("columns", row))
        number, text = int(self.file.ids[row]), self.file.text("text", row)
        first, second = self.file.gaps_of(row) if any(map(len, self.file.gaps)) else ((), ())
        own = self.file.text("given", row)
        given = json.loads(own) if own else None
        return Prompt(number, text, tokens, columns, response, rejected, first, second, given)

    def chosen(self, places: Sequence[int]) -> MappedPrompts:
        """Returns the prompts at these places."""
        return MappedPrompts(self.file, np.asarray(self._rows)[np.asarray(places, np.int64)])

    def identities(self) -> Iterator[Identity]:
        """Yields what `identities` does, without making prompts."""
        labels, has_gaps = {1: True, 0: False}, any(map(len, self.file.gaps))
        for row, (tokens, response, rejected) in self.texts(3):
            label = labels.get(int(self.file.labels[row]))
            gaps = NO_GAPS
            if has_gaps:
                first, second = self.file.gaps_of(row)
                gaps = f"{first}{second}".encode()
            yield int(self.file.ids[row]), tokens, response, rejected, gaps, label

    def texts(self, num: int) -> Iterator[tuple[int, tuple[bytes, ...]]]:
        """Yields of each prompt its row and, of the first `num` of its tokens, its response's and
        its rejected ones, the text of the tuple or NONE.
        """
        file = self.file
        sections = [*zip(_GIVEN, file.has, file.tokens, strict=True)][:num]
        of_all = sum(len(tokens) for _, _, tokens in sections) * len(self) // file.num
        write = TupleTexts(file.largest_token, of_all)
        for first in range(0, len(self), _ROWS_AT_ONCE):
            rows = np.asarray(self._rows[first : first + _ROWS_AT_ONCE], np.int64)
            starts = {name: file.offsets[name][rows] for name, _, _ in sections}
            lengths = {name: file.offsets[name][rows + 1] - starts[name] for name in starts}
            for begin, end in runs(sum(lengths.values(), np.zeros_like(rows)), _NUMBERS_AT_ONCE):
                texts = [
                    write(_joined(tokens, starts[name][begin:end], sizes), sizes)
                    if has
                    else [NONE] * (end - begin)
                    for name, has, tokens in sections
                    for sizes in [lengths[name][begin:end]]
                ]
                yield from zip(rows[begin:end].tolist(), zip(*texts, strict=True), strict=True)


def _joined(
    tokens: NDArray[np.int32], starts: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Returns the tokens of rows, one row after the other."""
    ends = (starts + lengths).tolist()
    parts = [tokens[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]
    return np.concatenate(parts)


def largest_token(prompts: Sequence[Prompt]) -> float:
    """Returns a bound of the tokens of prompts: no token is larger; infinite where none is known
    without looking at each.
    """
    return prompts.file.largest_token if isinstance(prompts, MappedPrompts) else math.inf
