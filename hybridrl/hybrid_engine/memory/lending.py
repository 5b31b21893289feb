"""Device memory that an engine uses during rollout and training uses during training.

The engine lends pieces of its physical memory. Lent pieces stay mapped at two addresses: the
engine's address, and the address where training stores gradients. A phase change therefore neither
frees nor allocates lent pieces, which would take the driver 3 to 4 ms per GiB
(benchmarks/results/phases_h100.json). The device needs memory only for the larger of the two uses.

Invariant: neither phase reads data that the other phase wrote. Gradients are cleared before the
first backward pass of every update; the next transition overwrites all lent weights, and the
engine's KV cache is cleared (rollout/common/engine_memory.py). If the engine cannot lend enough,
training allocates the rest itself and maps it only during training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from hybridrl.parallel.device_mapping import GRANULARITY


@dataclass(frozen=True)
class Piece:
    """A piece of physical device memory with its driver handle, always mapped as a whole."""

    handle: int
    num_bytes: int


class Mapping(Protocol):
    """Methods of `parallel.device_mapping.DeviceMapping` that this module calls."""

    def reserve(self, size: int) -> int: ...
    def free(self, address: int, size: int) -> None: ...
    def create(self, size: int) -> int: ...
    def release(self, handle: int) -> None: ...
    def map(self, address: int, size: int, handle: int) -> None: ...
    def allow(self, address: int, size: int) -> None: ...
    def unmap(self, address: int, size: int) -> None: ...
    def wait(self) -> None: ...
    def tensor(self, address: int, size: int) -> Tensor: ...


@runtime_checkable
class MemoryLender(Protocol):
    """An engine whose physical memory may be used by training while it sleeps."""

    def lend(self, num_bytes: int, keeps_weights: bool = False) -> list[Piece]:
        """Returns pieces of at least `num_bytes` in total, or all pieces if they are too few.

        With `keeps_weights`, only pieces of the KV cache are lent, so that frozen weights are sent
        only once. The pieces stay allocated in both phases. The engine must sleep.
        """

    def released_bytes(self) -> int:
        """Returns the bytes that the sleeping engine released but torch still counts as in use."""


def choose(sizes: Sequence[int], wanted: int) -> list[int]:
    """Returns the indices of a few sizes that reach `wanted` with little excess, or all indices."""
    largest_first = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    chosen: list[int] = []
    missing = wanted
    for index in largest_first:
        if missing <= 0:
            break
        enough = [other for other in largest_first if sizes[other] >= missing]
        fitting = [other for other in enough if other not in chosen]
        # Take the smallest size that is enough, or else the largest remaining size.
        chosen.append(fitting[-1] if fitting else index)
        missing -= sizes[chosen[-1]]
    return chosen


class LentMemory:
    """A contiguous address range for training: lent pieces, followed by its own memory.

    `restore` allocates this object's own memory and `release` frees it; calls must alternate and
    begin with `restore`.

    Attributes:
        address: Address of the first byte. Lent bytes are always accessible.
        num_lent_bytes: Number of the `num_bytes` that the lender provides.
    """

    def __init__(self, mapping: Mapping, num_bytes: int, pieces: Sequence[Piece]) -> None:
        self._mapping, self._own_handle = mapping, 0
        self._lent_size = sum(piece.num_bytes for piece in pieces)
        self._own_size = max(0, -(-(num_bytes - self._lent_size) // GRANULARITY) * GRANULARITY)
        self.num_lent_bytes = min(num_bytes, self._lent_size)
        self.address = mapping.reserve(self._lent_size + self._own_size)
        place = self.address
        for piece in pieces:
            mapping.map(place, piece.num_bytes, piece.handle)
            place += piece.num_bytes
        if pieces:
            mapping.allow(self.address, self._lent_size)

    @property
    def own_bytes(self) -> int:
        """Bytes that this object has mapped now, which torch's allocator does not count."""
        return self._own_size if self._own_handle else 0

    def restore(self) -> None:
        """Allocates and maps the memory that the lender did not provide, if any."""
        if self._own_size:
            place = self.address + self._lent_size
            self._own_handle = self._mapping.create(self._own_size)
            self._mapping.map(place, self._own_size, self._own_handle)
            self._mapping.allow(place, self._own_size)

    def release(self) -> None:
        """Frees the memory that `restore` allocated; lent pieces stay mapped."""
        if self._own_handle:
            self._mapping.wait()  # a sync point: an update may still be running
            self._mapping.unmap(self.address + self._lent_size, self._own_size)
            self._mapping.release(self._own_handle)
            self._own_handle = 0

    def close(self) -> None:
        if not self.address:
            return
        self._mapping.wait()  # a sync point, at the end of a run
        self.release()
        if self._lent_size:
            self._mapping.unmap(self.address, self._lent_size)
        self._mapping.free(self.address, self._lent_size + self._own_size)
        self.address = 0
