"""How checkpoints are read: by several threads, straight to their place, and verified."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hybridrl.checkpoint import manifest, tensor_files
from hybridrl.checkpoint.manifest import (
    DigestingFile,
    FileEntry,
    Manifest,
    open_for_reading,
    read_piece,
    verify_files,
)
from hybridrl.checkpoint.sharded_files import _FileReader
from hybridrl.checkpoint.tensor_files import DeviceRoom
from hybridrl.errors import CheckpointError


def written(file: Path, sizes: list[int]) -> tuple[bytes, FileEntry]:
    """Writes pieces of random bytes; returns all of them, and the file's entry."""
    content = torch.randint(256, (sum(sizes),), dtype=torch.uint8).numpy().tobytes()
    with file.open("wb", buffering=0) as handle:
        found, place = DigestingFile(handle), 0
        for size in sizes:
            found.write(content[place : place + size])
            found.end_piece()
            place += size
    return content, found.entry()


@pytest.mark.parametrize("way", ["memory", "device"])
@pytest.mark.parametrize(("begin", "size"), [(0, 10_000), (700, 8192), (9_999, 1), (3, 4096)])
def test_a_part_is_read_to_its_place_and_all_is_verified(
    way: str, begin: int, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "READ_BYTES", 1000)
    monkeypatch.setattr(tensor_files, "STAGED_BYTES", 1024)
    monkeypatch.setattr(tensor_files, "_STAGED", threading.local())
    file = tmp_path / "file"
    content, entry = written(file, [500, 10_000])
    target = torch.zeros(size, dtype=torch.uint8)

    def read() -> None:
        room = DeviceRoom(target) if way == "device" else tensor_files.tensor_room(target)
        with open_for_reading(file) as handle:
            parts = 500, 10_000, range(begin, begin + size), room, entry.pieces[1]
            read_piece(file, handle, *parts)

    read()
    assert target.untyped_storage().resizable(), "memory is freed while the engine generates"
    assert target.numpy().tobytes() == content[500 + begin : 500 + begin + size]
    for place in (500, 10_499):  # of the piece, which the part may lie within
        changed = bytearray(content)
        changed[place] ^= 1
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match="at bytes 500 to 10499"):
            read()
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="truncated file, which ends in bytes 500 to 10499"):
        read()


def test_the_first_damaged_piece_of_files_is_named(tmp_path: Path) -> None:
    files = []
    for name in ("a", "b"):
        content, entry = written(tmp_path / name, [300_000] * 5)
        files.append((tmp_path / name, entry))
    verify_files(files, 4)
    changed = bytearray(content)
    changed[700_000] ^= 1
    changed[-1] ^= 1
    files[1][0].write_bytes(changed)
    with pytest.raises(CheckpointError, match="/b: .*at bytes 600000 to 899999"):
        verify_files(files, 4)
    (tmp_path / "a").unlink()
    with pytest.raises(CheckpointError, match="/a: "):
        verify_files(files, 4)


@pytest.mark.parametrize(("saved", "is_same"), [((8, 2), True), ((12, 2), False), (None, False)])
def test_tensors_are_cleared_before_only_where_files_lack_rows(
    saved: tuple[int, ...] | None, is_same: bool, tmp_path: Path
) -> None:
    tensor = ShardedTensor.from_rank_offsets("a", torch.zeros(4, 2), (0, 1, 2))
    found = {}
    if saved is not None:
        found["a"] = TensorStorageMetadata(
            properties=None,  # type: ignore[arg-type]
            size=torch.Size(saved),
            chunks=[],
        )
    parts = Manifest(step=1, order=1, lineage=[], files={}), Metadata(found)
    reader = _FileReader(tmp_path, "policy", *parts, 4)
    assert reader.has_shape_of(tensor) is is_same
