"""Destinations of tensors that are read from files: host memory, or a GPU through staging memory.

Each reading thread has a little page-locked memory. So a tensor on a GPU needs no memory of its
size on the host, which would take longer to allocate than to fill, and one thread's bytes are
copied while others read. Invariant: copies are waited for, so staging memory may be overwritten.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from hybridrl.checkpoint.manifest import MemoryRoom, Room

STAGED_BYTES = 8 << 20  # at a time: enough for the link's rate, little over all threads
_STAGED = threading.local()


def tensor_room(target: torch.Tensor) -> Room:
    """Returns the destination for a contiguous tensor, which the caller keeps until all is read."""
    if not target.is_cpu:
        return DeviceRoom(target)
    # Not `numpy()`: a live tensor's storage is freed in rollout (training/memory.py), and torch
    # cannot resize a storage that numpy has seen.
    content = (ctypes.c_uint8 * target.nbytes).from_address(target.data_ptr())
    return MemoryRoom(memoryview(content).cast("B"))


class DeviceRoom:
    """A contiguous tensor as a destination, filled through staging memory (manifest.Room)."""

    def __init__(self, target: torch.Tensor) -> None:
        self._bytes = target.reshape(-1).view(torch.uint8)
        self._staged = _staged(target.is_cuda)

    def next_block(self, start: int) -> memoryview:
        """Returns staging memory for the bytes from `start`."""
        size = min(STAGED_BYTES, self._bytes.numel() - start)
        return self._staged[:size].numpy().data

    def filled(self, start: int, num_bytes: int) -> None:
        """Copies the block to the device; a sync point, as the next block reuses the memory."""
        self._bytes[start : start + num_bytes].copy_(self._staged[:num_bytes])


def _staged(is_locked: bool) -> torch.Tensor:
    """Returns this thread's staging memory of STAGED_BYTES."""
    name = "locked" if is_locked else "plain"
    if not hasattr(_STAGED, name):
        made = torch.empty(STAGED_BYTES, dtype=torch.uint8, pin_memory=is_locked)
        setattr(_STAGED, name, made)
    found: torch.Tensor = getattr(_STAGED, name)
    return found
