"""Reads and writes the manifest of a checkpoint: its files with sizes and digests. No torch.

`manifest.json`, whose digest is in `manifest.xxh3`, lists each file with its size and its pieces. A
piece is a byte range with an XXH3 digest. A sharded file has one piece per tensor, so that a rank
verifies exactly what it reads; every other file is a single piece. Digests detect damage, but do
not prove who wrote a file.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal, Protocol

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hybridrl.checkpoint.reading import in_threads, reading_threads
from hybridrl.config.files import parse_json
from hybridrl.errors import CheckpointError

MANIFEST, MANIFEST_DIGEST = "manifest.json", "manifest.xxh3"
# Bytes per read. The size is large, because parallel threads wait for the interpreter lock once per
# block.
READ_BYTES = 2 << 20
# Bytes per write. Files are written while training continues. A writing thread needs the
# interpreter lock twice per block, and a busy training thread keeps the lock for 5 ms each time.
# While a training thread is busy, a thread writes 0.04 GiB/s in blocks of 256 KiB, and 2 GiB/s in
# blocks of this size.
WRITE_BYTES = 32 << 20

Digest = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Whole = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Piece(_Part):
    """A byte range in a file, with the digest of its content."""

    offset: Whole
    length: Whole
    xxh3: Digest


class FileEntry(_Part):
    """Size of a file in bytes, and its pieces in ascending order of offset."""

    bytes: Whole
    pieces: list[Piece]


class Ancestor(_Part):
    """An earlier checkpoint in a history; `order` distinguishes those with the same step."""

    step: Whole
    order: Whole


class Manifest(_Part):
    """Content of `manifest.json`."""

    format: Literal[2] = 2
    step: Whole | None  # number of finished steps; None if the checkpoint contains only weights
    order: Whole  # number of this checkpoint in the order in which a run's checkpoints were written
    lineage: list[Ancestor]  # earlier checkpoints in the history of this checkpoint, newest first
    files: dict[str, FileEntry]  # entry of each file, by path within the checkpoint
    # First entry of the lineage, if it was still being written when the manifest was created and so
    # may not exist. Set only for copies in host memory.
    unfinished: Ancestor | None = None

    @field_validator("files")
    @classmethod
    def _check_paths(cls, files: dict[str, FileEntry]) -> dict[str, FileEntry]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or "\0" in name or not path.parts:
                raise ValueError(f"a path inside the checkpoint, not {name!r}")
        return files

    @property
    def has_digests(self) -> bool:
        """Whether the files can be verified; format 1 has no digests."""
        return any(entry.pieces for entry in self.files.values())

    def write(self, folder: Path) -> None:
        # Earlier versions of hybridrl reject unknown keys.
        left_out = {"unfinished"} if self.unfinished is None else set[str]()
        found = self.model_dump(mode="json", exclude=left_out)
        content = json.dumps(found, separators=(",", ":")).encode()
        (folder / MANIFEST).write_bytes(content)
        (folder / MANIFEST_DIGEST).write_text(digest_of(content) + "\n", encoding="ascii")


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Reads and verifies a manifest; returns it with its digest. Raises CheckpointError."""
    file = folder / MANIFEST
    content = _read(file)
    digest = digest_of(content)
    if _is_of_format_1(content):
        return _of_format_1(file, content), digest
    wanted = _read(folder / MANIFEST_DIGEST).decode("ascii", "replace").strip()
    if wanted != digest:
        raise damaged(
            file, f"digest {digest}", f"digest {wanted}, which is stored in {MANIFEST_DIGEST}"
        )
    try:
        return Manifest.model_validate_json(content), digest
    except ValidationError as error:
        raise damaged(file, _first_line(error), "a manifest of format 2") from None


def _is_of_format_1(content: bytes) -> bool:
    try:
        found = parse_json(content)
    except ValueError:
        return False
    return (
        isinstance(found, dict)
        and "state.json" in found
        and all(type(size) is int and size >= 0 for size in found.values())
    )


def _of_format_1(file: Path, content: bytes) -> Manifest:
    sizes: dict[str, int] = parse_json(content)
    files = {name: FileEntry(bytes=size, pieces=[]) for name, size in sizes.items()}
    _, _, step = file.parent.name.rpartition("step_")
    number = int(step) if step.isdecimal() else None
    try:
        return Manifest(step=number, order=0, lineage=[], files=files)
    except ValidationError as error:
        raise damaged(file, _first_line(error), "a manifest of format 1") from None


class DigestingFile:
    """Writes an empty, preferably unbuffered file from start to end, with pieces' digests."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size, self._begin = file, 0, 0
        self._digest = xxhash.xxh3_64()
        self._pieces: list[Piece] = []
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        """Writes bytes and returns their number. An error is also stored in `failure`."""
        view = memoryview(content).cast("B")
        for start in range(0, len(view), WRITE_BYTES):
            block = view[start : start + WRITE_BYTES]
            self._write_whole(block)
            self._digest.update(block)
        self._size += len(view)
        return len(view)

    def _write_whole(self, block: memoryview) -> None:
        try:
            while block:  # an unbuffered file may write only part of the data
                block = block[self._file.write(block) :]
        except OSError as error:
            self.failure = error
            raise

    def end_piece(self) -> Piece:
        """Ends the current piece and returns it. The next write begins a new piece."""
        length, found = self._size - self._begin, self._digest.hexdigest()
        self._pieces.append(Piece(offset=self._begin, length=length, xxh3=found))
        self._begin, self._digest = self._size, xxhash.xxh3_64()
        return self._pieces[-1]

    def entry(self) -> FileEntry:
        """Returns the manifest entry for the file. The last piece must have been ended."""
        assert self._begin == self._size
        return FileEntry(bytes=self._size, pieces=self._pieces)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._file.flush()


def write_digested(file: Path, content: bytes) -> FileEntry:
    """Writes a whole file durably. Returns its manifest entry."""
    with file.open("wb", buffering=0) as handle:
        written = DigestingFile(handle)
        written.write(content)
        written.end_piece()
        os.fsync(handle.fileno())
    return written.entry()


def entry_of(file: Path) -> FileEntry:
    """Computes the manifest entry for an existing file, with one piece."""
    digest, size = xxhash.xxh3_64(), 0
    with file.open("rb") as handle:
        while block := handle.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(bytes=size, pieces=[Piece(offset=0, length=size, xxh3=digest.hexdigest())])


def verify_piece(file: Path, handle: BinaryIO, piece: Piece) -> None:
    """Verifies a byte range in an open, preferably unbuffered file. Raises CheckpointError."""
    nothing = range(0), MemoryRoom(memoryview(b""))
    read_piece(file, handle, piece.offset, piece.length, *nothing, piece)


class Room(Protocol):
    """Destination for a part of a byte range. The part is filled from start to end."""

    def next_block(self, start: int) -> memoryview:
        """Returns memory for at least one byte from `start` on, within the part."""
        ...

    def filled(self, start: int, num_bytes: int) -> None:
        """Called when `num_bytes` bytes from `start` have been read."""
        ...


class MemoryRoom:
    """Host memory into which a file is read."""

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def next_block(self, start: int) -> memoryview:
        return self._content[start : start + READ_BYTES]

    def filled(self, start: int, num_bytes: int) -> None:
        """Does nothing, because the bytes are already in place."""


def read_piece(
    file: Path,
    handle: BinaryIO,
    offset: int,
    length: int,
    part: range,
    room: Room,
    piece: Piece | None,
) -> None:
    """Reads part of a byte range, and verifies the whole range.

    Args:
        file, handle: Path, shown in errors, and the open file, preferably unbuffered.
        offset, length: Byte range in the file.
        part: Bytes to read, relative to the range.
        room: Destination for these bytes.
        piece: The range with its digest; None if the checkpoint has no digests.

    Raises:
        CheckpointError: The range is truncated, or its content has changed.
    """
    digest, passed, place = xxhash.xxh3_64(), _thread_buffer(), 0
    try:
        handle.seek(offset)
        while place < length:
            is_wanted = part.start <= place < part.stop
            if is_wanted:
                block = room.next_block(place - part.start)
            else:
                limit = part.start if place < part.start else length
                block = passed[: min(limit - place, READ_BYTES)]
            num_read: int = handle.readinto(block)  # type: ignore[attr-defined]  # unbuffered files have it
            if not num_read:
                break
            digest.update(block[:num_read])
            if is_wanted:
                room.filled(place - part.start, num_read)
            place += num_read
    except OSError as error:
        raise _unreadable(file, error) from None
    where = f"bytes {offset} to {offset + length - 1}"
    if place < length:
        raise damaged(file, f"a truncated file, which ends in {where}", f"{offset + length} bytes")
    if piece is not None and digest.hexdigest() != piece.xxh3:
        what = f"a file whose content was changed at {where}"
        raise damaged(file, what, f"content with digest {piece.xxh3}")


_BUFFERS = threading.local()


def _thread_buffer() -> memoryview:
    """Returns a buffer that this thread reuses, because allocating takes longer than filling it."""
    if not hasattr(_BUFFERS, "content"):
        _BUFFERS.content = memoryview(bytearray(READ_BYTES))
    found: memoryview = _BUFFERS.content
    return found


def read_listed(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Reads and verifies a file. Raises CheckpointError if it is unlisted, missing or damaged."""
    file, entry = folder / name, manifest.files.get(name)
    if entry is None:
        raise damaged(
            file, "a file that does not belong to the checkpoint", f"a file that {MANIFEST} lists"
        )
    _check_size(file, entry)
    if not entry.pieces:  # format 1 has no digests
        return _read(file)
    verify_files([(file, entry)], 1)
    return _read(file)


def open_for_reading(file: Path) -> BinaryIO:
    """Opens a file unbuffered. Raises CheckpointError if it cannot be read."""
    try:
        return file.open("rb", buffering=0)  # type: ignore[return-value]  # it is unbuffered
    except OSError as error:
        raise _unreadable(file, error) from None


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raises CheckpointError for the first file that is missing or has not the listed size."""
    for name, entry in manifest.files.items():
        _check_size(folder / name, entry)


def verify_all(folder: Path, manifest: Manifest) -> None:
    """Verifies every byte of a checkpoint; CheckpointError names the first bad file."""
    check_sizes(folder, manifest)
    files = [(folder / name, entry) for name, entry in manifest.files.items()]
    verify_files(files, reading_threads())


def verify_files(files: Iterable[tuple[Path, FileEntry]], num_threads: int) -> None:
    """Verifies all pieces of several files in threads. Raises CheckpointError if one is damaged."""

    def verify(file: Path, piece: Piece) -> None:
        with open_for_reading(file) as handle:
            verify_piece(file, handle, piece)

    pieces = [(file, piece) for file, entry in files for piece in entry.pieces]
    in_threads([partial(verify, *one) for one in pieces], min(num_threads, len(pieces) or 1))


def _check_size(file: Path, entry: FileEntry) -> None:
    try:
        found = file.stat().st_size if file.is_file() else None
    except OSError as error:
        raise _unreadable(file, error) from None
    if found is None:
        what = "missing" if not file.exists() else "not a file"
        raise damaged(file, what, f"a file of {entry.bytes} bytes")
    if found != entry.bytes:
        raise damaged(file, f"{found} bytes", f"{entry.bytes} bytes, as written")


def damaged(file: Path, found: str, allowed: str) -> CheckpointError:
    """Returns the error for a damaged checkpoint file. `folders.with_remedy` adds the remedy."""
    return CheckpointError(str(file), found, allowed, "The checkpoint cannot be used.")


def digest_of(content: bytes) -> str:
    return xxhash.xxh3_64(content).hexdigest()


def _read(file: Path) -> bytes:
    try:
        if not file.is_file():  # reading a pipe would never end
            raise damaged(file, "missing" if not file.exists() else "not a file", "a file")
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return damaged(file, error.strerror or str(error), "a file that can be read")


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
