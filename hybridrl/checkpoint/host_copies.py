"""Copies of tensors in host memory, from which a checkpoint is written while training goes on.

Owns the memory: page-locked where tensors come from a GPU, so that copies run at the link's rate,
and kept from one checkpoint to the next, since locking pages takes longer than a copy. Invariant:
a copy is not changed between two calls of `take`; who reads it is done before the next checkpoint.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch


class HostCopies:
    """The copies of what one rank writes of a checkpoint."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, torch.Tensor] = {}

    def take(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy on the host that is all of its storage; `finish` before it is read.

        Args:
            name: of the tensor, one of this rank's.
            tensor: on any device.
        """
        copy = self._kept.get(name)
        if copy is None or (copy.shape, copy.dtype) != (tensor.shape, tensor.dtype):
            is_locked = tensor.is_cuda
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=is_locked)
            self._kept[name] = copy
        copy.copy_(tensor.detach(), non_blocking=True)
        return copy

    @property
    def num_bytes(self) -> int:
        """Of all copies."""
        return sum(copy.nbytes for copy in self._kept.values())

    def finish(self) -> None:
        """Waits until all copies are made: the one sync point of an asynchronous checkpoint."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
