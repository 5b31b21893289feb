"""Moves pieces of the optimizer state between host memory and the device during a step.

While a piece is updated, the next piece is copied to the device and the previous piece is copied
back. Each direction has its own CUDA stream. On a CPU, the same calls copy immediately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hybridrl.checkpoint.host_copies import page_locks
from hybridrl.checkpoint.reserved_memory import ReservedMemory, threads_beside_training
from hybridrl.errors import UserError

NUM_SLOTS = 3  # one piece is copied in, one is updated, and one is copied out
ALIGNMENT = 512  # bytes; alignment of each tensor in a slot or a shared buffer


def check_host_memory(found: Sequence[tuple[int, int, int]]) -> None:
    """Raises UserError if a host has less free memory than its ranks will allocate."""
    for host in sorted({host for host, _, _ in found}):
        needed = [size for other, size, _ in found if other == host]
        free = min(size for other, _, size in found if other == host)
        if sum(needed) > free:
            share = free / len(needed) / 1e9
            raise _too_large(max(needed), f"{share:.1f} GB are free for each rank of a host")


class HostState:
    """Zero-filled host memory for an optimizer state; page-locked if the device is a GPU.

    Raises UserError if the operating system does not allow this process as much memory.
    """

    def __init__(self, num_bytes: int, device: torch.device, num_ranks: int = 1) -> None:
        self._reserved: ReservedMemory | None = None  # unlocks its memory when it is deleted
        if device.type == "cpu" or not num_bytes:
            # numpy allocates the memory, so that a view can become a tensor with its own storage.
            self.bytes = torch.from_numpy(np.zeros(num_bytes, np.uint8))
            return
        threads = threads_beside_training(num_ranks)
        try:
            self._reserved = ReservedMemory(num_bytes, threads, *page_locks())
        except OSError as error:
            raise _too_large(num_bytes, f"the operating system refuses it ({error})") from None
        locked = self._reserved.tensor()
        if locked is None:
            raise _too_large(num_bytes, "this process may not lock as much memory (ulimit -l)")
        self.bytes = locked


class Staging:
    """Device memory through which pieces of a host state pass during one step.

    Args:
        pieces: Host tensors of each piece, in the order in which the step updates them.
    """

    def __init__(self, pieces: Sequence[Sequence[Tensor]], device: torch.device) -> None:
        self._pieces = pieces
        piece_bytes = max(
            (sum(aligned(one.nbytes) for one in piece) for piece in pieces), default=0
        )
        self._slots = [
            torch.empty(piece_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)
        ]
        self._is_gpu = device.type == "cuda"
        self._inward: Any = torch.cuda.Stream(device) if self._is_gpu else None
        self._outward: Any = torch.cuda.Stream(device) if self._is_gpu else None
        self._is_free: list[Any] = [None] * NUM_SLOTS  # event: the slot was copied to the host

    def __iter__(self) -> Iterator[list[Tensor]]:
        """Yields device copies of each piece's tensors. Changes to the copies are written to the
        host when the next piece is requested; iterate to the end.
        """
        pieces = self._pieces
        arriving = [self._copy_in(0, pieces[0])] if pieces else []
        for number, piece in enumerate(pieces):
            if number + 1 < len(pieces):
                arriving.append(self._copy_in(number + 1, pieces[number + 1]))
            copies, is_here = arriving.pop(0)
            if self._is_gpu:
                is_here.wait()
            yield copies
            self._copy_out(number, piece, copies)
        if self._is_gpu:
            # A sync point: afterwards the state on the host is complete, so that checkpoints can
            # read it, and the slots can be freed.
            self._outward.synchronize()

    def _copy_in(self, number: int, piece: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        slot, used, copies = self._slots[number % NUM_SLOTS], 0, []
        if self._is_gpu:
            if number < NUM_SLOTS:  # the slots' memory may have had another use before
                self._inward.wait_stream(torch.cuda.current_stream())
            else:
                self._inward.wait_event(self._is_free[number % NUM_SLOTS])
        with self._on(self._inward):
            for tensor in piece:
                copy = slot[used : used + tensor.nbytes].view(tensor.dtype)
                copies.append(copy.copy_(tensor, non_blocking=True))
                used += aligned(tensor.nbytes)
            return copies, self._inward.record_event() if self._is_gpu else None

    def _copy_out(self, number: int, piece: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        if self._is_gpu:
            self._outward.wait_stream(torch.cuda.current_stream())
        with self._on(self._outward):
            for tensor, copy in zip(piece, copies, strict=True):
                tensor.copy_(copy, non_blocking=True)
            if self._is_gpu:
                self._is_free[number % NUM_SLOTS] = self._outward.record_event()

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream) if self._is_gpu else nullcontext()


def _too_large(num_bytes: int, reason: str) -> UserError:
    return UserError(
        "train.optimizer_memory",
        "host",
        f"low_precision or device here: the state of a rank needs {num_bytes / 1e9:.1f} GB of "
        f"page-locked host memory, and {reason}",
        "Use more hosts, or set train.optimizer_memory=low_precision.",
    )


def aligned(num_bytes: int) -> int:
    """Returns a size rounded up to a multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
