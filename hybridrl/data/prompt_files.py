"""Writes and memory-maps Arrow files with tokenized prompts, which several processes share. Does
not import torch.

A file contains one row per prompt, grouped into record batches. The file name ends with a digest of
the content, so that damaged and incomplete files are never read. In addition to the tokens, each
row stores a digest of the prompt (`digest`) and the number that is compared with `data.eval_share`
(`share`). A run can therefore start without reading all tokens. Functions import pyarrow locally,
because importing it starts a thread.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import xxhash
from numpy.typing import NDArray

from hybridrl.contracts.prompts import Prompt, contents_from_bytes, contents_to_bytes

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_BATCH_ROWS, _MAX_BATCH_BYTES = 1024, 16 << 20


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
    """Returns the bytes that identify a prompt among a run's data: its number, tokens, gaps, label
    and contents. Checkpoints store digests of these bytes, so their format must not change.
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
    """Returns a digest of each prompt's identity."""
    if isinstance(prompts, MappedPrompts):
        return prompts.numbers("digest")
    return np.array([_digest(identity(prompt)) for prompt in prompts], np.uint64)


def shares(prompts: Sequence[Prompt]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the number of each prompt, and a value between 0 and 1 computed from its tokens."""
    if isinstance(prompts, MappedPrompts):
        return prompts.numbers("prompt_id"), prompts.numbers("share")
    numbers = np.array([prompt.prompt_id for prompt in prompts], np.int64)
    return numbers, np.array([_share(prompt) for prompt in prompts], np.float64)


def select_prompts(prompts: Sequence[Prompt], places: NDArray[np.intp]) -> Sequence[Prompt]:
    """Returns the prompts at these indices."""
    if isinstance(prompts, MappedPrompts):
        return MappedPrompts(prompts.table, prompts.rows[places])
    return tuple(prompts[place] for place in places.tolist())


def largest_token(prompts: Sequence[Prompt]) -> float:
    """Returns an upper bound on the token ids. Returns infinity if finding a bound would require
    reading all prompts.
    """
    return prompts.largest_token if isinstance(prompts, MappedPrompts) else math.inf


def _digest(text: bytes) -> int:
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


def _share(prompt: Prompt) -> float:
    return _digest(str(prompt.tokens).encode()) / 2**64


def write_prompts(
    path: Path, prompts: Iterable[tuple[Prompt, int]], about: Callable[[], bytes]
) -> None:
    """Writes prompts and the number of each prompt's source to a file.

    Args:
        path: File to write.
        prompts: Pairs of a prompt and the number of its source.
        about: Function called after the last prompt; its result is stored in the file.

    Raises:
        UnstorableError: Arrow or JSON cannot store one of the prompts.
        OSError: The file cannot be written.
    """
    import pyarrow as pa

    largest, schema = -1, _schema()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        for rows in _batches(prompts):
            largest = max(largest, *(row.pop("largest") for row in rows))
            try:
                batch = pa.RecordBatch.from_pylist(rows, schema)
            except (pa.ArrowException, OverflowError, TypeError, UnicodeError) as error:
                raise UnstorableError(f"a value that Arrow cannot store ({error})") from error
            writer.write_batch(batch)
        # The last batch has no rows. Its metadata contain values that are known only after the last
        # row.
        empty = pa.RecordBatch.from_pylist([], schema)
        writer.write_batch(empty, {"about": about(), "largest_token": str(largest)})


def _batches(prompts: Iterable[tuple[Prompt, int]]) -> Iterator[list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    num_bytes = 0
    for prompt, source in prompts:
        rows.append(_row(prompt, source))
        num_bytes += len(prompt.text) + 4 * len(prompt.tokens) + len(rows[-1]["columns"])
        num_bytes += len(rows[-1]["contents"] or b"")
        if len(rows) == _MAX_BATCH_ROWS or num_bytes > _MAX_BATCH_BYTES:
            yield rows
            rows, num_bytes = [], 0
    if rows:
        yield rows


def _row(prompt: Prompt, source: int) -> dict[str, Any]:
    columns = dict(prompt.columns)
    if not _is_json(columns) or not _is_json(prompt.given):
        raise UnstorableError("a column with values that JSON does not have")
    tokens = prompt.tokens, prompt.response_tokens or (), prompt.rejected_tokens or ()
    return {
        "prompt_id": prompt.prompt_id,
        "source": source,
        "digest": _digest(identity(prompt)),
        "share": _share(prompt),
        "text": prompt.text,
        "tokens": prompt.tokens,
        "response_tokens": prompt.response_tokens,
        "rejected_tokens": prompt.rejected_tokens,
        "response_gaps": prompt.response_gaps or None,
        "rejected_gaps": prompt.rejected_gaps or None,
        "columns": json.dumps(columns, ensure_ascii=False),
        "given": None if prompt.given is None else json.dumps(prompt.given, ensure_ascii=False),
        "contents": contents_to_bytes(prompt.contents) or None,
        "largest": max(itertools.chain(*tokens), default=-1),
    }


def _is_json(value: object) -> bool:
    """Whether JSON preserves a value, including its types."""
    kind = type(value)
    if kind is dict:
        return all(type(k) is str and _is_json(v) for k, v in value.items())  # type: ignore[attr-defined]
    if kind is list:
        return all(map(_is_json, value))  # type: ignore[call-overload]
    return value is None or kind in (str, int, float, bool)


class MappedPrompts(Sequence[Prompt]):
    """Prompts stored in a file. Each Prompt object is created on access.

    Args:
        table: Arrow table with one row per prompt.
        rows: Indices of the table rows to use, in order; None for all rows.
    """

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
        """Returns a numeric column."""
        found: NDArray[Any] = self.table[name].to_numpy()[self.rows]
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
    return tuple(value.values.to_numpy().tolist()) if value.is_valid else None


def read_prompts(path: Path) -> tuple[MappedPrompts, bytes]:
    """Memory-maps a file from `write_prompts`. Returns its prompts and the bytes that `about`
    returned.
    """
    import pyarrow as pa

    reader = pa.ipc.open_file(pa.memory_map(str(path)))
    last = reader.num_record_batches - 1
    metadata = reader.get_batch_with_custom_metadata(last).custom_metadata
    batches = [reader.get_batch(number) for number in range(last)]
    table = pa.Table.from_batches(batches, _schema().with_metadata(dict(metadata)))
    return MappedPrompts(table), metadata[b"about"]


def rename_by_content(path: Path, key: str, ending: str) -> Path:
    """Renames a file to its key and the digest of its content. Returns the new path."""
    named = path.with_name(f"{key}-{_content_digest(path)}{ending}")
    os.replace(path, named)
    return named


def is_intact(path: Path) -> bool:
    """Whether the content of a file matches the digest in its name."""
    return path.stem.rpartition("-")[2] == _content_digest(path)


def _content_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()
