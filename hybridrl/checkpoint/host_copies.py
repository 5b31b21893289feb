"""Copies of tensors in host memory, from which a checkpoint is written while training continues.

Owns the memory: page-locked for tensors from a GPU, so that copies run at the link's rate, and kept
between checkpoints, since locking pages takes longer than a copy. It can be reserved, so that the
first copies do not wait for it. Invariant: a copy does not change between two checkpoints; its
readers finish before the next one begins.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from hybridrl.checkpoint.host_memory import available_bytes
from hybridrl.checkpoint.optimizer_state import Allocator
from hybridrl.checkpoint.reserved_memory import ReservedMemory, threads_beside_training
from hybridrl.checkpoint.segments import FIRST_BYTES, next_segment_bytes

ALIGNMENT_BYTES = 512  # torch's own alignment of tensors


def locked_memory(num_bytes: int) -> torch.Tensor:
    """Returns page-locked memory; uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class Segments:
    """Tensors one after the other in segments of memory.

    torch allocates page-locked memory in powers of two: one tensor of 272 MB would take 512 MiB.

    Args:
        make: Allocates a segment of a number of bytes; uint8.
    """

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._free: list[tuple[torch.Tensor, int]] = []  # segments, and where their free ends begin

    def add(self, segment: torch.Tensor) -> None:
        """Adds a segment for tensors; uint8."""
        self._free.append((segment, 0))

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor that fills its storage."""
        size = math.prod(shape) * dtype.itemsize
        index = next((i for i, (one, at) in enumerate(self._free) if at + size <= len(one)), None)
        if index is None:
            index = len(self._free)
            least = 1 << max(size - 1, 0).bit_length()
            taken = sum(len(segment) for segment, _ in self._free)
            self._free.append((self._make(max(next_segment_bytes(taken), least)), 0))
        segment, begin = self._free[index]
        self._free[index] = segment, begin + math.ceil(size / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        # Through numpy: a torch slice would keep the segment's storage.
        return torch.from_numpy(segment.numpy()[begin : begin + size]).view(dtype).view(shape)


class HostCopies:
    """Copies of the tensors that one rank writes into a checkpoint."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._allocated: dict[int, torch.Tensor] = {}  # by `allocators`, by where it begins
        self._begins: list[int] = []  # ascending
        self._locked = Segments(locked_memory)
        self._reserved: ReservedMemory | None = None
        self._has_reserved = False  # in the segments

    def reserve(self, num_bytes: int, num_ranks: int) -> None:
        """Begins, once, to allocate page-locked memory in the background; not if the ranks of this
        host would leave less than half of its free memory.

        Args:
            num_bytes: Approximate size of the copies.
            num_ranks: Number of ranks on this host, all of which call this.
        """
        if self._reserved is not None or self._kept or not torch.cuda.is_available():
            return
        if num_bytes < FIRST_BYTES or num_bytes * num_ranks > available_bytes() / 2:
            return
        runtime, device = torch.cuda.cudart(), torch.cuda.current_device()
        locks = partial(_lock, device), runtime.cudaHostUnregister
        with suppress(OSError):
            more = num_bytes + FIRST_BYTES  # for the alignment of tensors
            self._reserved = ReservedMemory(more, threads_beside_training(num_ranks), *locks)

    def take(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Begins to copy a tensor from any device to the host; call `finish` before reading the
        copy.

        The copy fills its storage. `name` is unique among this rank's tensors.
        """
        if not tensor.is_cuda and self._is_allocated(tensor):
            return tensor
        copy = self._kept_as(name, tensor.shape, tensor.dtype, tensor.is_cuda)
        copy.copy_(tensor.detach(), non_blocking=True)
        return copy

    def allocators(self, model: str) -> Callable[[int], Allocator]:
        """Returns, by an optimizer's number, an allocator for one state of a whole parameter,
        page-locked for states from a GPU. `take` returns such memory unchanged.

        Args:
            model: Name of the optimizers' model.
        """

        def allocate(
            number: int, key: tuple[int, str], num_elements: int, device: torch.device
        ) -> torch.Tensor:
            name, shape = (model, number, *key), torch.Size([num_elements])
            found = self._kept_as(name, shape, torch.float32, device.type == "cuda")
            begin = found.data_ptr()
            if begin not in self._allocated:
                insort(self._begins, begin)
            self._allocated[begin] = found
            return found

        return lambda number: partial(allocate, number)

    def _is_allocated(self, tensor: torch.Tensor) -> bool:
        before = bisect_right(self._begins, tensor.data_ptr())
        if before == 0:
            return False
        begin = self._begins[before - 1]
        return tensor.data_ptr() + tensor.nbytes <= begin + self._allocated[begin].nbytes

    def _kept_as(
        self, name: Hashable, shape: torch.Size, dtype: torch.dtype, is_locked: bool
    ) -> torch.Tensor:
        """Returns the memory under that name, the same one unless shape or type has changed."""
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (shape, dtype):
            kept = self._kept[name] = (self._empty_locked if is_locked else _empty)(shape, dtype)
        return kept

    def _empty_locked(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        if self._reserved is not None and not self._has_reserved:
            self._has_reserved = True
            if (segment := self._reserved.tensor()) is not None:
                self._locked.add(segment)
            else:
                self._reserved = None
        return self._locked.empty(shape, dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of all copies as stored in files; page-locked segments are larger."""
        return sum(copy.nbytes for copy in self._kept.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes of host memory that `reserve` has taken so far."""
        return 0 if self._reserved is None else self._reserved.num_taken

    def finish(self) -> None:
        """Waits until all copies are made: the one sync point of an asynchronous checkpoint."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def _lock(device: int, address: int, num_bytes: int) -> None:
    """Page-locks memory for a device, which a new thread must select first."""
    torch.cuda.set_device(device)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))


def _empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Returns numpy's memory, of which each view can become a whole storage."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(dtype).view(shape)
