"""How a rank's sharded files are written, and read as far as digests and an index allow."""

from __future__ import annotations

import gc
import io
import os
import pickle
import resource
import weakref
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from small_runs import files_of_at_most
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hybridrl.checkpoint.manifest import (
    DigestingFile,
    FileEntry,
    Manifest,
    entry_of,
    verify_piece,
)
from hybridrl.checkpoint.sharded_files import INDEX, _FileWriter, into_files, load_index
from hybridrl.errors import CheckpointError

SIZE, PER_FILE = torch.Size([1000]), 6


class OnDevice:
    """A tensor of a device: its copy on the host is made when it is asked for."""

    is_cpu = False
    on_host: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def detach(self) -> OnDevice:
        return self

    def to(self, device: str, copy: bool) -> torch.Tensor:
        if self.value < 0:
            raise RuntimeError("the device is lost")
        found = torch.full(SIZE, self.value)
        OnDevice.on_host.add(found)
        OnDevice.most = max(OnDevice.most, len(OnDevice.on_host))
        return found


def writer(folder: Path, values: list[list[float]]) -> _FileWriter:
    """Returns a writer of a file a list, with a tensor a value."""
    made, chunk = _FileWriter(folder), ChunkStorageMetadata(torch.Size([0]), SIZE)
    for number, file in enumerate(values):
        items = [
            WriteItem(
                MetadataIndex(f"{number}.{value}"),
                WriteItemType.TENSOR,
                tensor_data=TensorWriteData(chunk, TensorProperties(), SIZE),
            )
            for value in file
        ]
        made._buckets.append((f"{number}", list(zip(items, map(OnDevice, file), strict=True))))
    return made


def test_tensors_come_to_the_host_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fork")
    values = [[10.0 * number + i for i in range(PER_FILE)] for number in range(2)]
    gc.collect()
    made = writer(tmp_path, values)
    made.write()
    results = made.retrieve_write_results()
    assert [len(results), sorted(made.entries)] == [12, ["0", "1"]]
    assert 0 < OnDevice.most <= 4  # of twelve; a file's next is made before its last is given up
    for number, file in enumerate(values):
        content = (tmp_path / f"{number}").read_bytes()
        entry = made.entries[f"{number}"]
        assert entry.bytes == len(content) == sum(piece.length for piece in entry.pieces)
        for value, piece in zip(file, entry.pieces, strict=True):
            part = content[piece.offset : piece.offset + piece.length]
            assert xxhash.xxh3_64(part).hexdigest() == piece.xxh3
            place = next(r for r in results if r.index.fqn == f"{number}.{value}").storage_data
            assert (place.offset, place.length) == (piece.offset, piece.length)
            (tmp_path / "part").write_bytes(part)
            found = torch.load(tmp_path / "part", weights_only=True)
            assert torch.equal(found, torch.full(SIZE, value))


def test_a_file_is_written_over_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0").write_bytes(b"\1" * 99_999)
    inode, sizes = (tmp_path / "0").stat().st_ino, set[int]()
    real = DigestingFile.write

    def write(self: DigestingFile, content: Any) -> int:
        sizes.add((tmp_path / "0").stat().st_size)
        return real(self, content)

    monkeypatch.setattr(DigestingFile, "write", write)
    made = writer(tmp_path, [[1.0, 2.0], [3.0]])
    assert made.names == ["0", "1"]
    made.write()
    for number in range(2):
        entry, file = made.entries[f"{number}"], tmp_path / f"{number}"
        assert file.stat().st_size == entry.bytes < 20_000
        with file.open("rb", buffering=0) as handle:
            for piece in entry.pieces:
                verify_piece(file, handle, piece)
    assert (tmp_path / "0").stat().st_ino == inode
    assert 99_999 in sizes and 0 not in sizes  # or its memory would be given back first


@pytest.mark.parametrize("fails", ["a tensor", "a file", "the disk"])
def test_a_failed_file_is_the_result(tmp_path: Path, fails: str) -> None:
    made = writer(tmp_path, [[1.0, 2.0], [3.0, -1.0 if fails == "a tensor" else 4.0]])
    if fails == "a file":
        (tmp_path / "1").mkdir()
    with files_of_at_most(5000 if fails == "the disk" else resource.RLIM_INFINITY):
        made.write()
    error, _ = made.retrieve_write_results()
    kinds = {"a tensor": RuntimeError, "a file": IsADirectoryError, "the disk": OSError}
    assert isinstance(error, kinds[fails]), error
    assert fails != "the disk" or "large" in str(error)  # and not what torch makes of it
    assert gc.isenabled() and torch.serialization.get_crc32_options()


class Malicious:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.made),))


@pytest.mark.parametrize(
    "content",
    [
        lambda made: pickle.dumps(Malicious(made)),
        lambda made: pickle.dumps({"storage_data": Malicious(made)}),
        lambda made: b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x01:\x85R.",
        lambda made: b"cbuiltins\neval\n(S'1'\ntR.",
        lambda made: b"cbuiltins\ngetattr\n(ctorch\nSize\nS'numel'\ntR.",
        lambda made: pickle.dumps({"a": 1}),
        lambda made: pickle.dumps(torch.Size([1])),
        lambda made: b"no pickle",
        lambda made: b"",
    ],
)
def test_an_index_runs_nothing(tmp_path: Path, content: object) -> None:
    folder, made = tmp_path / "step_1", tmp_path / "made"
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / INDEX).write_bytes(content(made))  # type: ignore[operator]
    name = f"policy/{INDEX}"
    for entry in (
        entry_of(folder / name),
        FileEntry(bytes=(folder / name).stat().st_size, pieces=[]),
    ):
        manifest = Manifest(step=1, order=1, lineage=[], files={name: entry})
        with pytest.raises(CheckpointError, match="index|pickle"):
            load_index(folder, "policy", manifest)
        assert not made.exists()


class OldPickler(pickle.Pickler):
    """Pickles enums as Python 3.11.0 to 3.11.3 do, Debian 12's among them."""

    def reducer_override(self, one: Any) -> Any:
        return (getattr, (type(one), one.name)) if isinstance(one, Enum) else NotImplemented


def test_an_index_of_an_early_python_3_11_is_read(tmp_path: Path) -> None:
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.bfloat16), SIZE, [])
    written = Metadata(state_dict_metadata={"weight": tensor}, storage_data={})
    content = io.BytesIO()
    OldPickler(content).dump(written)
    assert b"getattr" in content.getvalue()
    name = f"policy/{INDEX}"
    file = tmp_path / name
    file.parent.mkdir()
    file.write_bytes(content.getvalue())
    manifest = Manifest(step=1, order=1, lineage=[], files={name: entry_of(file)})
    assert load_index(tmp_path, "policy", manifest) == written


def test_tensors_are_divided_among_files_of_similar_size() -> None:
    def item(index: int, length: int) -> WriteItem:
        index_of, size = MetadataIndex(str(index)), torch.Size([length])
        if not length:
            return WriteItem(index_of, WriteItemType.BYTE_IO)
        chunk = ChunkStorageMetadata(torch.Size([0]), size)
        written = TensorWriteData(chunk, TensorProperties(torch.float32), size)
        return WriteItem(index_of, WriteItemType.SHARD, tensor_data=written)

    items = [item(index, length) for index, length in enumerate([1, 0, 50, 2, 30, 0, 25, 3])]
    files = into_files(items, 2)
    assert sorted(items, key=id) == sorted((one for file in files for one in file), key=id)
    sizes = [
        sum(0 if one.tensor_data is None else one.tensor_data.size.numel() for one in file)
        for file in files
    ]
    assert sorted(sizes) == [55, 56]
    assert [sum(one.type == WriteItemType.BYTE_IO for one in file) for file in files] == [1, 1]
    assert into_files(items[:1], 3)[1:] == [[], []]
