"""Writes and memory-maps Arrow files with tokenized prompts, which processes share. No torch.

A file contains one row per prompt, grouped into record batches. The file name ends with a digest of
the content, so that damaged and incomplete files are never read. Each row also stores a digest of
the prompt (`digest`) and the number that is compared with `data.eval_share` (`share`), so that a
run can start without reading all tokens. At most 1 record batch is in memory while writing. pyarrow
is imported locally, because importing it starts a thread.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from hybridrl.contracts.prompts import Prompt, contents_from_bytes, contents_to_bytes

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_BATCH_ROWS, _MAX_BATCH_BYTES = 1024, 4 << 20


@functools.cache
def _schema() -> pa.Schema:
    import pyarrow as pa

    tokens = pa.large_list(pa.int32())
    return pa.schema(
        {
            "prompt_id": pa.int64(),
            "source": pa.int32(),
            "digest": pa.uint64(),
            "share": pa.float64(),
            "text": pa.large_string(),
            "tokens": tokens,
            "response_tokens": tokens,
            "rejected_tokens": tokens,
            "response_gaps": tokens,
            "rejected_gaps": tokens,
            "columns": pa.large_string(),  # JSON
            "given": pa.large_string(),  # JSON
            "contents": pa.large_binary(),
        }
    )


class UnstorableError(Exception):
    """Raised for a prompt that Arrow or JSON cannot store without changing it."""


def identity(prompt: Prompt) -> bytes:
    """Returns the bytes that identify a prompt: number, tokens, gaps, label and contents.

    Checkpoints store digests of these bytes, so their format must not change.
    """
    given = prompt.tokens, prompt.response_tokens
    text = "".join(map(str, (prompt.prompt_id, *given)))
    if prompt.rejected_tokens is not None:
        text += str(prompt.rejected_tokens)
    if prompt.response_gaps or prompt.rejected_gaps:
        text += f"{prompt.response_gaps}{prompt.rejected_gaps}"
    label = prompt.columns.get("label")
    if isinstance(label, bool) and prompt.response_tokens:
        text += str(label)
    text += "".join(f"{c.kind} {c.start} {c.num_tokens} {c.key}" for c in prompt.contents)
    return text.encode()


def digests(prompts: Sequence[Prompt]) -> NDArray[np.uint64]:
    if isinstance(prompts, MappedPrompts):
        return prompts.numbers("digest")
    return np.array([_digest(identity(prompt)) for prompt in prompts], np.uint64)


def shares(prompts: Sequence[Prompt]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the number of each prompt, and a value in [0, 1] from its tokens and images."""
    if isinstance(prompts, MappedPrompts):
        return prompts.numbers("prompt_id"), prompts.numbers("share")
    numbers = np.array([prompt.prompt_id for prompt in prompts], np.int64)
    return numbers, np.array([_share(prompt) for prompt in prompts], np.float64)


def select_prompts(prompts: Sequence[Prompt], places: NDArray[np.intp]) -> Sequence[Prompt]:
    if isinstance(prompts, MappedPrompts):
        return MappedPrompts(prompts.table, prompts.rows[places])
    return tuple(prompts[place] for place in places.tolist())


def largest_token(prompts: Sequence[Prompt]) -> float:
    """Returns an upper bound on the token ids; infinity if all prompts would have to be read."""
    return prompts.largest_token if isinstance(prompts, MappedPrompts) else math.inf


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def _share(prompt: Prompt) -> float:
    return _digest(prompt.input_key.encode()) / 2**64


def write_prompts(
    path: Path, prompts: Iterable[tuple[Prompt, int]], about: Callable[[], bytes]
) -> None:
    """Writes prompts, each with the number of its source, to a file, with the result of `about`,
    which is called after the last prompt.

    Raises:
        UnstorableError: Arrow or JSON cannot store one of the prompts.
        OSError: The file cannot be written.
    """
    import pyarrow as pa

    largest, schema = -1, _schema()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for rows in _batches(prompts):
            largest = max(largest, *(row.pop("largest") for row in rows))
            writer.write_batch(_record_batch(rows))
            rows.clear()  # frees the rows before the next ones are read
        # The last batch has no rows. Its metadata contain values that are known only after the last
        # row.
        writer.write_batch(_record_batch([]), {"about": about(), "largest_token": str(largest)})


def _batches(prompts: Iterable[tuple[Prompt, int]]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    for prompt, source in prompts:
        try:
            rows.append(_row(prompt, source))
        except (OverflowError, TypeError, UnicodeError) as error:
            raise UnstorableError(f"a value that Arrow cannot store ({error})") from error
        num_bytes += sum(memoryview(v).nbytes for v in rows[-1].values() if _is_buffer(v))
        if len(rows) == _MAX_BATCH_ROWS or num_bytes > _MAX_BATCH_BYTES:
            yield rows
            rows, num_bytes = [], 0
    if rows:
        yield rows


def _is_buffer(value: object) -> bool:
    return isinstance(value, bytes | array)


def _row(prompt: Prompt, source: int) -> dict[str, Any]:
    """Returns a table row, of arrays and UTF-8, which need less memory than Python objects."""
    columns, given = dict(prompt.columns), prompt.given
    if not _is_json(columns) or not _is_json(given):
        raise UnstorableError("a column with values that JSON does not have")
    tokens = prompt.tokens, prompt.response_tokens or (), prompt.rejected_tokens or ()
    return {
        "prompt_id": prompt.prompt_id,
        "source": source,
        "digest": _digest(identity(prompt)),
        "share": _share(prompt),
        "text": prompt.text.encode(),
        "tokens": _int32(prompt.tokens),
        "response_tokens": _int32(prompt.response_tokens),
        "rejected_tokens": _int32(prompt.rejected_tokens),
        "response_gaps": _int32(prompt.response_gaps or None),
        "rejected_gaps": _int32(prompt.rejected_gaps or None),
        "columns": json.dumps(columns, ensure_ascii=False).encode(),
        "given": None if given is None else json.dumps(given, ensure_ascii=False).encode(),
        "contents": contents_to_bytes(prompt.contents) or None,
        "largest": max(itertools.chain(*tokens), default=-1),
    }


def _int32(numbers: tuple[int, ...] | None) -> array[int] | None:
    return None if numbers is None else array("i", numbers)


def _record_batch(rows: Sequence[dict[str, Any]]) -> pa.RecordBatch:
    """Returns a record batch. pyarrow 26's `RecordBatch.from_pylist` would import pandas."""
    import pyarrow as pa

    schema = _schema()
    columns = [_column(field.type, [row[field.name] for row in rows]) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    """Returns a column of numbers, or of values with a variable length (texts, bytes, lists)."""
    import pyarrow as pa

    if pa.types.is_primitive(kind):
        numbers = pa.py_buffer(np.array(values, kind.to_pandas_dtype()))
        return pa.Array.from_buffers(kind, len(values), [None, numbers])
    ends = np.cumsum([0, *(0 if value is None else len(value) for value in values)], dtype=np.int64)
    present = np.array([value is not None for value in values], np.bool_)
    bits = None if present.all() else pa.py_buffer(np.packbits(present, bitorder="little"))
    content = pa.py_buffer(b"".join(value for value in values if value is not None))
    buffers = [bits, pa.py_buffer(ends)]
    if not pa.types.is_large_list(kind):
        return pa.Array.from_buffers(kind, len(values), [*buffers, content])
    items = pa.Array.from_buffers(kind.value_type, int(ends[-1]), [None, content])
    return pa.Array.from_buffers(kind, len(values), buffers, children=[items])


def _is_json(value: object) -> bool:
    kind = type(value)
    if kind is dict:
        return all(type(k) is str and _is_json(v) for k, v in value.items())  # type: ignore[attr-defined]
    if kind is list:
        return all(map(_is_json, value))  # type: ignore[call-overload]
    return value is None or kind in (str, int, float, bool)


class MappedPrompts(Sequence[Prompt]):
    """Prompts in the rows of a table, by default all. A Prompt object is created on access."""

    def __init__(self, table: pa.Table, rows: NDArray[np.int64] | None = None) -> None:
        self.table = table
        self.rows = np.arange(len(table)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def largest_token(self) -> int:
        """Largest token id in the whole file."""
        return int(self.table.schema.metadata[b"largest_token"])

    def numbers(self, name: str) -> NDArray[Any]:
        # Not `to_numpy`, because this function of pyarrow (26) imports pandas.
        chunks = [np.from_dlpack(chunk) for chunk in self.table[name].chunks]
        found: NDArray[Any] = np.concatenate(chunks)[self.rows]
        return found

    @overload
    def __getitem__(self, place: int) -> Prompt: ...
    @overload
    def __getitem__(self, place: slice) -> MappedPrompts: ...
    def __getitem__(self, place: int | slice) -> Prompt | MappedPrompts:
        if isinstance(place, slice):
            return MappedPrompts(self.table, self.rows[place])
        index = int(self.rows[place])
        row = {name: self.table[name][index] for name in _schema().names}
        given = row["given"].as_py()
        tokens = _numbers(row["tokens"])
        assert tokens is not None
        return Prompt(
            prompt_id=row["prompt_id"].as_py(),
            text=row["text"].as_py(),
            tokens=tokens,
            columns=json.loads(row["columns"].as_py()),
            response_tokens=_numbers(row["response_tokens"]),
            rejected_tokens=_numbers(row["rejected_tokens"]),
            response_gaps=_numbers(row["response_gaps"]) or (),
            rejected_gaps=_numbers(row["rejected_gaps"]) or (),
            given=None if given is None else json.loads(given),
            contents=contents_from_bytes(row["contents"].as_py() or b""),
        )


def _numbers(value: Any) -> tuple[int, ...] | None:
    return tuple(np.from_dlpack(value.values).tolist()) if value.is_valid else None


def read_prompts(path: Path) -> tuple[MappedPrompts, bytes]:
    """Memory-maps a file from `write_prompts`. Returns its prompts and the result of `about`."""
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    last = reader.num_record_batches - 1
    metadata = reader.get_batch_with_custom_metadata(last).custom_metadata
    batches = [reader.get_batch(number) for number in range(last)]
    table = pa.Table.from_batches(batches, _schema().with_metadata(dict(metadata)))
    return MappedPrompts(table), metadata[b"about"]


def rename_by_content(path: Path, key: str, ending: str) -> Path:
    named = path.with_name(f"{key}-{_content_digest(path)}{ending}")
    os.replace(path, named)
    return named


def is_intact(path: Path) -> bool:
    """Whether the content of a file matches the digest in its name."""
    return path.stem.rpartition("-")[2] == _content_digest(path)


def _content_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
