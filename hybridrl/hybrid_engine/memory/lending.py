"""Device memory that an engine needs in rollout and training in training: one memory for both.

The engine lends pieces of its physical memory, which are then mapped at two addresses for good: the
engine's, and those where training keeps its gradients. So a change of phases neither releases nor
creates them, which takes the driver 3 to 4 ms a GiB (benchmarks/results/phases_h100.json), and the
device needs room for the larger of the two, not for both.

Invariant: no phase reads what the other wrote. Gradients are cleared before the first backward of
every update; the engine's lent weights are all written by the next update, and its KV cache is
cleared (rollout/common/engine_memory.py). What the lender cannot give is memory of training's own,
mapped only while it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from hybridrl.parallel.device_mapping import GRANULARITY


@dataclass(frozen=True)
class Piece:
    """A piece of physical memory.

    Args:
        handle: the driver's, which its lender releases.
        num_bytes: all of it is mapped at once.
    """

    handle: int
    num_bytes: int


class Mapping(Protocol):
    """What is asked of `parallel.device_mapping.DeviceMapping`, whose docstrings hold."""

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
    """An engine whose physical memory others may use while it sleeps."""

    def lend(self, num_bytes: int) -> list[Piece]:
        """Returns pieces of so many bytes or somewhat more, fewer if that is all there is. From now
        on they are the engine's in both phases. To be called while it sleeps.
        """
        ...

    def released_bytes(self) -> int:
        """Returns the bytes of tensors that have no memory now, since the engine sleeps; torch's
        allocator counts them all the same.
        """
        ...


def choose(sizes: Sequence[int], wanted: int) -> list[int]:
    """Returns indices of sizes whose sum reaches `wanted`, or all: few, and little beyond it."""
    largest_first = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    chosen: list[int] = []
    missing = wanted
    for index in largest_first:
        if missing <= 0:
            break
        enough = [other for other in largest_first if sizes[other] >= missing]
        fitting = [other for other in enough if other not in chosen]
        # The smallest that ends it, if one does; else the largest of the rest.
        chosen.append(fitting[-1] if fitting else index)
        missing -= sizes[chosen[-1]]
    return chosen


class LentMemory:
    """Addresses in a row for training, over lent pieces and own memory for the rest.

    Made released: own memory comes with `restore`, and the two calls alternate as those of
    `phases.Restorable`.

    Args:
        mapping: of the device.
        num_bytes: that are needed.
        pieces: of the lender, the first of the addresses.

    Attributes:
        address: of the first byte; lent bytes are readable and writable at any time.
        num_lent_bytes: of `num_bytes`, those that are the lender's.
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
        """Own memory that is mapped now, which torch's allocator does not know of."""
        return self._own_size if self._own_handle else 0

    def restore(self) -> None:
        """Makes and maps own memory, if any is needed.

        Raises:
            torch.OutOfMemoryError: the device has none.
        """
        if self._own_size:
            place = self.address + self._lent_size
            self._own_handle = self._mapping.create(self._own_size)
            self._mapping.map(place, self._own_size, self._own_handle)
            self._mapping.allow(place, self._own_size)

    def release(self) -> None:
        """Gives own memory back; the lender goes on with its own."""
        if self._own_handle:
            self._mapping.wait()  # a sync point: an update may still be on its way
            self._mapping.unmap(self.address + self._lent_size, self._own_size)
            self._mapping.release(self._own_handle)
            self._own_handle = 0

    def close(self) -> None:
        """Gives own memory and the addresses back. Lent pieces may be released before or later."""
        if not self.address:
            return
        self._mapping.wait()  # a sync point, at the end of a run
        self.release()
        if self._lent_size:
            self._mapping.unmap(self.address, self._lent_size)
        self._mapping.free(self.address, self._lent_size + self._own_size)
        self.address = 0
