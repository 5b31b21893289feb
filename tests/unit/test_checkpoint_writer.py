"""How a rank's files of a checkpoint are written: in its process, one tensor after the other."""

from __future__ import annotations

import gc
import os
import queue
import weakref
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.filesystem import _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hybridrl.platform import _save_checkpoints_in_this_process

SIZE, PER_FILE = torch.Size([1000]), 6


class OnDevice:
    """A tensor of a device: its copy on the host is made when it is asked for."""

    on_host: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def __init__(self, value: float) -> None:
        self.value = value

    def cpu(self) -> torch.Tensor:
        if self.value < 0:
            raise RuntimeError("the device is lost")
        copy = torch.full(SIZE, self.value)
        OnDevice.on_host.add(copy)
        OnDevice.most = max(OnDevice.most, len(OnDevice.on_host))
        return copy


def buckets(folder: Path, values: list[list[float]]) -> list[tuple]:
    made = []
    chunk = ChunkStorageMetadata(torch.Size([0]), SIZE)
    for number, file in enumerate(values):
        items = [
            WriteItem(
                MetadataIndex(f"{number}.{value}"),
                WriteItemType.TENSOR,
                tensor_data=TensorWriteData(chunk, TensorProperties(), SIZE),
            )
            for value in file
        ]
        tensors = list(zip(items, map(OnDevice, file), strict=True))
        made.append((str(folder / f"{number}"), f"{number}", ([], tensors)))
    return made


def write(made: list[tuple]) -> dict | Exception:
    _save_checkpoints_in_this_process()
    writer = FileSystemWriterAsync
    results: queue.SimpleQueue = queue.SimpleQueue()
    made = writer.preload_tensors(made, True)
    writer.write_preloaded_data_multiproc([_StorageWriterTransforms()], False, 0, made, results)
    return results.get_nowait()


def test_tensors_come_to_the_host_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "fork")
    values = [[10.0 * number + i for i in range(PER_FILE)] for number in range(2)]
    gc.collect()
    written = write(buckets(tmp_path, values))
    assert isinstance(written, dict) and [len(written[number]) for number in range(2)] == [6, 6]
    assert 0 < OnDevice.most <= 4  # of twelve; a file's next is made before its last is given up
    for number, file in enumerate(values):
        content = (tmp_path / f"{number}").read_bytes()
        for value, found in zip(file, written[number], strict=True):
            place = found.storage_data
            part = tmp_path / "part"
            part.write_bytes(content[place.offset : place.offset + place.length])
            assert torch.equal(torch.load(part, weights_only=True), torch.full(SIZE, value))


@pytest.mark.parametrize("fails", ["a tensor", "a file"])
def test_a_failed_file_is_the_result(tmp_path: Path, fails: str) -> None:
    made = buckets(tmp_path, [[1.0, 2.0], [3.0, -1.0 if fails == "a tensor" else 4.0]])
    if fails == "a file":
        (tmp_path / "1").mkdir()
    found = write(made)
    assert isinstance(found, IsADirectoryError if fails == "a file" else RuntimeError)
    assert gc.isenabled()
