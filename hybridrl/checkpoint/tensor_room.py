"""Destinations for tensors that are read from files: host memory, or a GPU through staging memory.

Each reading thread has a small page-locked staging buffer. Allocating a host buffer as large as the
tensor would take longer than filling it. While one thread copies to the GPU, others read.
Invariant: each copy is complete before its thread overwrites the staging buffer.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from hybridrl.checkpoint.manifest import MemoryRoom, Room

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
