"""Copies tensors to host memory, so that a checkpoint can be written while training continues.

Memory for tensors from a GPU is page-locked, so that copying uses the full bandwidth of the link.
It is kept between checkpoints, because locking pages takes longer than copying. Invariant: a copy
does not change until all its readers finish, before the next checkpoint begins.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from hybridrl.checkpoint.host_memory import FIRST_BYTES, available_bytes, next_segment_bytes
from hybridrl.checkpoint.optimizer_state import Allocator
from hybridrl.checkpoint.reserved_memory import ReservedMemory, threads_beside_training

ALIGNMENT_BYTES = 512  # alignment that torch uses for tensors


def locked_memory(num_bytes: int) -> torch.Tensor:
    """Allocates page-locked memory; uint8."""
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class Segments:
    """Places tensors one after another in large segments of memory, which `make` allocates. torch
    rounds page-locked memory up to powers of two: a tensor of 272 MB would occupy 512 MiB.
    """

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._free: list[
            tuple[torch.Tensor, int]
        ] = []  # segments, and the offset of their free space

    def add(self, segment: torch.Tensor) -> None:
        self._free.append((segment, 0))

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Returns an uninitialized tensor whose storage is exactly as large as the tensor."""
        size = math.prod(shape) * dtype.itemsize
        index = next((i for i, (one, at) in enumerate(self._free) if at + size <= len(one)), None)
        if index is None:
            index = len(self._free)
            least = 1 << max(size - 1, 0).bit_length()
            taken = sum(len(segment) for segment, _ in self._free)
            self._free.append((self._make(max(next_segment_bytes(taken), least)), 0))
        segment, begin = self._free[index]
        self._free[index] = segment, begin + math.ceil(size / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        # Slice with numpy, because a torch slice would share the storage of the whole segment.
        return torch.from_numpy(segment.numpy()[begin : begin + size]).view(dtype).view(shape)


class HostCopies:
    """Host copies of all tensors that one rank writes to a checkpoint."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}
        self._allocated: dict[int, torch.Tensor] = {}  # allocated through `allocators`, by address
        self._begins: list[int] = []  # start addresses of `_allocated`, ascending
        self._locked = Segments(locked_memory)
        self._reserved: ReservedMemory | None = None
        self._has_reserved = False  # whether segments use reserved memory

    def reserve(self, num_bytes: int, num_ranks: int) -> None:
        """Starts, at the first call, to allocate page-locked memory in the background, unless this
        host's `num_ranks`, which must all call, would use more than half of its free memory.
        """
        if self._reserved is not None or self._kept or not torch.cuda.is_available():
            return
        if num_bytes < FIRST_BYTES or num_bytes * num_ranks > available_bytes() / 2:
            return
        with suppress(OSError):
            more = num_bytes + FIRST_BYTES  # additional space to align tensors
            self._reserved = ReservedMemory(more, threads_beside_training(num_ranks), *page_locks())

    def take(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Starts to copy a tensor to a storage of its size; `finish` before reading the copy."""
        if not tensor.is_cuda and self._is_allocated(tensor):
            return tensor
        copy = self._kept_as(name, tensor.shape, tensor.dtype, tensor.is_cuda)
        copy.copy_(tensor.detach(), non_blocking=True)
        return copy

    def allocators(self, model: str) -> Callable[[int], Allocator]:
        """Returns an Allocator per optimizer for states to save, whose memory `take`
        does not copy.
        """

        def allocate(
            number: int,
            key: tuple[int, str],
            num_elements: int,
            dtype: torch.dtype,
            device: torch.device,
        ) -> torch.Tensor:
            name, shape = (model, number, *key), torch.Size([num_elements])
            found = self._kept_as(name, shape, dtype, device.type == "cuda")
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
        """Returns memory for a tensor; that of the last copy if shape and dtype are the same."""
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
        """Total bytes of all copies in files; the page-locked segments are larger."""
        return sum(copy.nbytes for copy in self._kept.values())

    @property
    def reserved_bytes(self) -> int:
        return 0 if self._reserved is None else self._reserved.num_taken

    def finish(self) -> None:
        """Waits until all copies are complete, the only sync point of a checkpoint in progress."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()


def page_locks() -> tuple[Callable[[int, int], None], Callable[[int], object]]:
    """Returns functions for `ReservedMemory` that lock and unlock memory for the current device."""
    return partial(_lock, torch.cuda.current_device()), torch.cuda.cudart().cudaHostUnregister


def _lock(device: int, address: int, num_bytes: int) -> None:
    """Page-locks memory for a device, which new threads must select first."""
    torch.cuda.set_device(device)
    torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))


def _empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Allocates memory with numpy, so that each view of it can become a separate torch storage."""
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(dtype).view(shape)
