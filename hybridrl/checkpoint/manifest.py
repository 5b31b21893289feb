"""Manifest of a checkpoint: its files, their sizes and their digests.

Owns `manifest.json` and `manifest.xxh3`, its own digest. A file is listed with its size and with
pieces: byte ranges, each with an XXH3 digest. A sharded file has a piece for every tensor in it, so
that a rank verifies exactly what it reads; other files have one piece. Digests find damage of
disks, of transfers and by hand; they do not prove who wrote a file. No torch.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal, Protocol

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hybridrl.checkpoint.reading import in_threads, reading_threads
from hybridrl.config.files import parse_json
from hybridrl.errors import CheckpointError

MANIFEST, MANIFEST_DIGEST = "manifest.json", "manifest.xxh3"
# Size of a read: large, as parallel threads wait for Python's lock once a block.
READ_BYTES = 2 << 20
# Size of a write. Threads write during training, whose Python code keeps the interpreter lock for
# 5 ms whenever they ask for it, twice a block: next to a busy thread they write 0.04 GiB/s with
# blocks of 256 KiB and 2 GiB/s with these.
WRITE_BYTES = 32 << 20

Digest = Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
Whole = Annotated[int, Field(ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Piece(_Part):
    """A byte range of a file, in bytes, and the digest of its content."""

    offset: Whole
    length: Whole
    xxh3: Digest


class FileEntry(_Part):
    """Size of a file in bytes, and its pieces in order of their offsets."""

    bytes: Whole
    pieces: list[Piece]


class Ancestor(_Part):
    """A checkpoint that the run went through on the way to another.

    Args:
        step: Number of finished steps.
        order: `Manifest.order`; tells apart two checkpoints of the same step.
    """

    step: Whole
    order: Whole


class Manifest(_Part):
    """Content of `manifest.json`.

    Args:
        format: Version of the format.
        step: Number of finished steps; None for weights alone.
        order: Number of this checkpoint in the order in which those of the run folder were written.
        lineage: Checkpoints that the run went through before, newest first.
        files: Entries by path within the checkpoint.
        unfinished: First entry of the lineage, if it was still being written and so may not exist.
            Only copies in host memory have one.
    """

    format: Literal[2] = 2
    step: Whole | None
    order: Whole
    lineage: list[Ancestor]
    files: dict[str, FileEntry]
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
        """Whether files can be verified; format 1 has no digests."""
        return any(entry.pieces for entry in self.files.values())

    def write(self, folder: Path) -> None:
        """Writes the manifest and its digest."""
        # Earlier versions refuse keys that they do not know.
        left_out = {"unfinished"} if self.unfinished is None else set[str]()
        found = self.model_dump(mode="json", exclude=left_out)
        content = json.dumps(found, separators=(",", ":")).encode()
        (folder / MANIFEST).write_bytes(content)
        (folder / MANIFEST_DIGEST).write_text(digest_of(content) + "\n", encoding="ascii")


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Reads and verifies a checkpoint's manifest; returns it and its digest.

    Raises:
        CheckpointError: The manifest is missing, damaged or malformed.
    """
    file = folder / MANIFEST
    content = _read(file)
    digest = digest_of(content)
    if _is_of_format_1(content):
        return _of_format_1(file, content), digest
    wanted = _read(folder / MANIFEST_DIGEST).decode("ascii", "replace").strip()
    if wanted != digest:
        raise damaged(file, f"digest {digest}", f"{wanted}, which {MANIFEST_DIGEST} says")
    try:
        return Manifest.model_validate_json(content), digest
    except ValidationError as error:
        raise damaged(file, _first_line(error), "a manifest of format 2") from None


def _is_of_format_1(content: bytes) -> bool:
    """Whether this is a manifest of format 1: sizes by path, without digests."""
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
    """A file that is written from start to end, and the digests of its pieces.

    Has the methods that torch.save calls on a file.

    Args:
        file: Empty file that is open for writing, preferably unbuffered.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._size, self._begin = file, 0, 0
        self._digest = xxhash.xxh3_64()
        self._pieces: list[Piece] = []
        self.failure: OSError | None = None

    def write(self, content: Any) -> int:
        """Writes bytes and returns their number. An error is also kept in `failure`."""
        view = memoryview(content).cast("B")
        for start in range(0, len(view), WRITE_BYTES):
            block = view[start : start + WRITE_BYTES]
            self._write_whole(block)
            self._digest.update(block)
        self._size += len(view)
        return len(view)

    def _write_whole(self, block: memoryview) -> None:
        try:
            while block:  # an unbuffered file may write less than all
                block = block[self._file.write(block) :]
        except OSError as error:
            self.failure = error
            raise

    def end_piece(self) -> Piece:
        """Ends the current piece and returns it; the next write begins another."""
        length, found = self._size - self._begin, self._digest.hexdigest()
        self._pieces.append(Piece(offset=self._begin, length=length, xxh3=found))
        self._begin, self._digest = self._size, xxhash.xxh3_64()
        return self._pieces[-1]

    def entry(self) -> FileEntry:
        """Returns the manifest's entry of the file; the last piece must be ended."""
        assert self._begin == self._size
        return FileEntry(bytes=self._size, pieces=self._pieces)

    def tell(self) -> int:
        """Returns the offset of the next byte."""
        return self._size

    def flush(self) -> None:
        """Passes the file's buffer to the operating system."""
        self._file.flush()


def write_digested(file: Path, content: bytes) -> FileEntry:
    """Writes a whole file, durably; returns its manifest entry."""
    with file.open("wb", buffering=0) as handle:
        written = DigestingFile(handle)
        written.write(content)
        written.end_piece()
        os.fsync(handle.fileno())
    return written.entry()


def entry_of(file: Path) -> FileEntry:
    """Returns the manifest entry, of one piece, of an existing file."""
    digest, size = xxhash.xxh3_64(), 0
    with file.open("rb") as handle:
        while block := handle.read(READ_BYTES):
            digest.update(block)
            size += len(block)
    return FileEntry(bytes=size, pieces=[Piece(offset=0, length=size, xxh3=digest.hexdigest())])


def verify_piece(file: Path, handle: BinaryIO, piece: Piece) -> None:
    """Verifies a byte range of an open, preferably unbuffered file; raises CheckpointError."""
    nothing = range(0), MemoryRoom(memoryview(b""))
    read_piece(file, handle, piece.offset, piece.length, *nothing, piece)


class Room(Protocol):
    """Destination of a part of a byte range, filled from its start to its end."""

    def next_block(self, start: int) -> memoryview:
        """Returns memory for the bytes of the part from `start`: at least one byte, none beyond its
        end.
        """
        ...

    def filled(self, start: int, num_bytes: int) -> None:
        """Reports that `num_bytes` from `start` have been read."""
        ...


class MemoryRoom:
    """A destination in host memory."""

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def next_block(self, start: int) -> memoryview:
        """Returns memory for the bytes from `start`."""
        return self._content[start : start + READ_BYTES]

    def filled(self, start: int, num_bytes: int) -> None:
        """Does nothing: the bytes are already in place."""


def read_piece(
    file: Path,
    handle: BinaryIO,
    offset: int,
    length: int,
    part: range,
    room: Room,
    piece: Piece | None,
) -> None:
    """Reads a part of a byte range, and verifies all of the range.

    Args:
        file: Path, for the error.
        handle: File that is open for reading, preferably unbuffered.
        offset, length: Byte range in the file.
        part: Wanted bytes, relative to the range.
        room: Destination of the wanted bytes.
        piece: Range with its digest; None if the checkpoint has no digests to verify.

    Raises:
        CheckpointError: The range is cut short, or its content has changed.
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
            num_read: int = handle.readinto(block)  # type: ignore[attr-defined]  # of a raw file
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
        raise damaged(file, f"a file that is cut short in {where}", f"{offset + length} bytes")
    if piece is not None and digest.hexdigest() != piece.xxh3:
        what = f"a file that holds something else than was written at {where}"
        raise damaged(file, what, f"content of digest {piece.xxh3}")


_BUFFERS = threading.local()


def _thread_buffer() -> memoryview:
    """Returns this thread's buffer of READ_BYTES; allocating one takes longer than filling it."""
    if not hasattr(_BUFFERS, "content"):
        _BUFFERS.content = memoryview(bytearray(READ_BYTES))
    found: memoryview = _BUFFERS.content
    return found


def read_listed(folder: Path, name: str, manifest: Manifest) -> bytes:
    """Reads and verifies a file; raises CheckpointError if it is unlisted, missing or damaged."""
    file, entry = folder / name, manifest.files.get(name)
    if entry is None:
        raise damaged(file, "no file of the checkpoint", f"a file that {MANIFEST} lists")
    _check_size(file, entry)
    if not entry.pieces:  # format 1 has no digests
        return _read(file)
    verify_file(file, entry, 1)
    return _read(file)


def open_for_reading(file: Path) -> BinaryIO:
    """Opens a file unbuffered; raises CheckpointError if it cannot be read."""
    try:
        return file.open("rb", buffering=0)  # type: ignore[return-value]  # raw, as pieces want it
    except OSError as error:
        raise _unreadable(file, error) from None


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Checks that all files exist in their sizes; raises CheckpointError for the first that does
    not.
    """
    for name, entry in manifest.files.items():
        _check_size(folder / name, entry)


def verify_all(
    folder: Path, manifest: Manifest, notify: Callable[[str], None] = lambda text: None
) -> None:
    """Reads and verifies every byte of a checkpoint.

    Args:
        folder: Checkpoint folder.
        manifest: Manifest of the checkpoint.
        notify: Receives a line about each file before it is read.

    Raises:
        CheckpointError: A file is missing or damaged; names the first.
    """
    check_sizes(folder, manifest)
    for name, entry in manifest.files.items():
        notify(f"{name}: {entry.bytes} bytes")
        verify_file(folder / name, entry, reading_threads())


def verify_file(file: Path, entry: FileEntry, num_threads: int) -> None:
    """Verifies all pieces of a file; raises CheckpointError."""
    verify_files([(file, entry)], num_threads)


def verify_files(files: Iterable[tuple[Path, FileEntry]], num_threads: int) -> None:
    """Verifies all pieces of files in several threads; raises CheckpointError."""

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
    """Returns the error of a damaged file of a checkpoint; `folders.with_remedy` completes it."""
    return CheckpointError(str(file), found, allowed, "The checkpoint cannot be used.")


def digest_of(content: bytes) -> str:
    """Returns the XXH3 digest as 16 hexadecimal digits."""
    return xxhash.xxh3_64(content).hexdigest()


def _read(file: Path) -> bytes:
    try:
        if not file.is_file():  # a pipe would never end
            raise damaged(file, "missing" if not file.exists() else "not a file", "a file")
        return file.read_bytes()
    except OSError as error:
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: OSError) -> CheckpointError:
    return damaged(file, error.strerror or str(error), "a file that can be read")


def _first_line(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the file'}: {first['msg']}"
