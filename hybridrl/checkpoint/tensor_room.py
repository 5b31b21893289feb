"""Where the bytes of a tensor are read to from a file: its own memory, or that of a GPU through a
little page-locked memory of each reading thread.

So a tensor of a GPU needs no memory of its size on the host, which would take longer to get than to
fill, and what one thread reads is copied while others read. Copies are waited for: invariant, what
a thread has handed over may be overwritten.
"""

from __future__ import annotations

import ctypes
import threading

import torch

from hybridrl.checkpoint.manifest import MemoryRoom, Room

STAGED_BYTES = 8 << 20  # at a time: enough for the link's rate, little over all threads
_STAGED = threading.local()


def tensor_room(target: torch.Tensor) -> Room:
    """Returns where a part of a file is read to.

    Args:
        target: contiguous; kept by the caller until all is read.
    """
    if not target.is_cpu:
        return DeviceRoom(target)
    # Not by `numpy()`: a live tensor's storage is freed in rollout (training/memory.py), and torch
    # resizes none that numpy has seen.
    content = (ctypes.c_uint8 * target.nbytes).from_address(target.data_ptr())
    return MemoryRoom(memoryview(content).cast("B"))


class DeviceRoom:
    """A tensor that a part of a file is read to (manifest.Room).

    Args:
        target: contiguous, on any device; its bytes are those of the part.
    """

    def __init__(self, target: torch.Tensor) -> None:
        self._bytes = target.reshape(-1).view(torch.uint8)
        self._staged = _staged(target.is_cuda)

    def next_block(self, start: int) -> memoryview:
        """Returns where the bytes from `start` on go."""
        size = min(STAGED_BYTES, self._bytes.numel() - start)
        return self._staged[:size].numpy().data

    def filled(self, start: int, num_bytes: int) -> None:
        """Copies them to the device; a sync point, as the next block takes their place."""
        self._bytes[start : start + num_bytes].copy_(self._staged[:num_bytes])


def _staged(is_locked: bool) -> torch.Tensor:
    """Returns STAGED_BYTES of this thread."""
    name = "locked" if is_locked else "plain"
    if not hasattr(_STAGED, name):
        made = torch.empty(STAGED_BYTES, dtype=torch.uint8, pin_memory=is_locked)
        setattr(_STAGED, name, made)
    found: torch.Tensor = getattr(_STAGED, name)
    return found
