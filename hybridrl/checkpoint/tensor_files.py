"""Writes tensors to files of sharded tensors, and reads them to host memory or to a GPU.

Each reading thread has a small page-locked staging buffer. Allocating a host buffer as large as the
tensor would take longer than filling it. While one thread copies to the GPU, others read.
Invariant: each copy is complete before its thread overwrites the staging buffer.
"""

from __future__ import annotations

import ctypes
import os
import threading

import torch

from hybridrl.checkpoint.manifest import DigestingFile, MemoryRoom, Room


class _WithoutCrc32:
    """Turns off the checksums of torch.save, for a fifth of its time, because digests suffice. Each
    thread that writes must enter this context. The option belongs to the thread (torch 2.13) or to
    the process (other versions); in the latter case, the last thread that leaves restores it.
    """

    def __init__(self) -> None:
        self._lock, self._num_inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_inside:
                self._before = torch.serialization.get_crc32_options()
            torch.serialization.set_crc32_options(False)
            self._num_inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_inside -= 1
            if not self._num_inside:
                torch.serialization.set_crc32_options(self._before)


without_crc32 = _WithoutCrc32()


def without_truncating(path: str, flags: int) -> int:
    """Opens a file without O_TRUNC, so that overwriting the file reuses its memory."""
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def save_tensor(tensor: torch.Tensor, file: DigestingFile) -> None:
    """Writes a tensor from any device. If writing failed, raises the error from the file."""
    try:
        torch.save(on_host(tensor), file)  # type: ignore[arg-type]  # has what torch needs
    except RuntimeError as error:  # torch hides the error from the file
        raise file.failure or error from None


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor on the host, with a storage of its size, which torch.save writes."""
    tensor = tensor.detach()
    if tensor.is_cpu and tensor.untyped_storage().size() == tensor.numel() * tensor.itemsize:
        return tensor
    return tensor.to("cpu", copy=True)


STAGED_BYTES = 8 << 20  # large enough for the full bandwidth of the link
_STAGED = threading.local()


def tensor_room(target: torch.Tensor) -> Room:
    """Returns the destination for a contiguous tensor, which the caller must keep alive."""
    if not target.is_cpu:
        return DeviceRoom(target)
    # Do not use `numpy()`: the storages of parameters are freed during rollouts
    # (training/memory.py), and torch cannot resize a storage that was exposed to numpy.
    content = (ctypes.c_uint8 * target.nbytes).from_address(target.data_ptr())
    return MemoryRoom(memoryview(content).cast("B"))


class DeviceRoom:
    """A contiguous tensor as a destination, filled through staging memory (manifest.Room)."""

    def __init__(self, target: torch.Tensor) -> None:
        self._bytes = target.reshape(-1).view(torch.uint8)
        self._staged = _staged(target.is_cuda)

    def next_block(self, start: int) -> memoryview:
        size = min(STAGED_BYTES, self._bytes.numel() - start)
        return self._staged[:size].numpy().data

    def filled(self, start: int, num_bytes: int) -> None:
        """Copies the block to the device, a sync point, because the staging memory is reused."""
        self._bytes[start : start + num_bytes].copy_(self._staged[:num_bytes])


def _staged(is_locked: bool) -> torch.Tensor:
    name = "locked" if is_locked else "plain"
    if not hasattr(_STAGED, name):
        made = torch.empty(STAGED_BYTES, dtype=torch.uint8, pin_memory=is_locked)
        setattr(_STAGED, name, made)
    found: torch.Tensor = getattr(_STAGED, name)
    return found
