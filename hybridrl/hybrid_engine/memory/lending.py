"""Device memory that an engine uses during rollout and training uses during training.

The engine lends pieces of its physical memory. They stay mapped at two addresses: the engine's, and
the one where training keeps gradients. So a phase change neither frees nor creates them, which
would take the driver 3 to 4 ms a GiB (benchmarks/results/phases_h100.json), and the device needs
room only for the larger use.

Invariant: no phase reads data that the other wrote. Gradients are cleared before the first backward
pass of every update; the next transition overwrites all lent weights, and the engine's KV cache is
cleared (rollout/common/engine_memory.py). If the lender has too little, the rest is training's own
memory, which is mapped only during training.
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
        handle: Handle of the driver; the lender releases it.
        num_bytes: Size, which is always mapped as a whole.
    """

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
    """An engine whose physical memory others may use while it sleeps."""

    def lend(self, num_bytes: int) -> list[Piece]:
        """Returns pieces of at least `num_bytes` together, or fewer if there are no more.

        The pieces stay allocated in both phases from then on. Call it while the engine sleeps.
        """
        ...

    def released_bytes(self) -> int:
        """Returns the bytes of tensors that have no physical memory while the engine sleeps.

        torch's allocator still counts them.
        """
        ...


def choose(sizes: Sequence[int], wanted: int) -> list[int]:
    """Returns indices of few sizes whose sum reaches `wanted` with little excess, or all."""
    largest_first = sorted(range(len(sizes)), key=lambda index: -sizes[index])
    chosen: list[int] = []
    missing = wanted
    for index in largest_first:
        if missing <= 0:
            break
        enough = [other for other in largest_first if sizes[other] >= missing]
        fitting = [other for other in enough if other not in chosen]
        # The smallest size that is enough; if there is none, the largest of the rest.
        chosen.append(fitting[-1] if fitting else index)
        missing -= sizes[chosen[-1]]
    return chosen


class LentMemory:
    """Consecutive addresses for training, backed by lent pieces and by own memory for the rest.

    Own memory is first mapped by `restore`; `restore` and `release` alternate, as in
    `phases.Restorable`.

    Args:
        mapping: Mapping of the device.
        num_bytes: Number of bytes needed.
        pieces: Pieces of the lender; they get the first addresses.

    Attributes:
        address: Address of the first byte; lent bytes are accessible at any time.
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
        """Bytes of own memory mapped now, which torch's allocator does not count."""
        return self._own_size if self._own_handle else 0

    def restore(self) -> None:
        """Creates and maps own memory, if any is needed.

        Raises:
            torch.OutOfMemoryError: The device has too little memory.
        """
        if self._own_size:
            place = self.address + self._lent_size
            self._own_handle = self._mapping.create(self._own_size)
            self._mapping.map(place, self._own_size, self._own_handle)
            self._mapping.allow(place, self._own_size)

    def release(self) -> None:
        """Frees own memory; lent pieces stay mapped."""
        if self._own_handle:
            self._mapping.wait()  # a sync point: an update may still be on its way
            self._mapping.unmap(self.address + self._lent_size, self._own_size)
            self._mapping.release(self._own_handle)
            self._own_handle = 0

    def close(self) -> None:
        """Frees own memory and the addresses. Lent pieces may be released before or after."""
        if not self.address:
            return
        self._mapping.wait()  # a sync point, at the end of a run
        self.release()
        if self._lent_size:
            self._mapping.unmap(self.address, self._lent_size)
        self._mapping.free(self.address, self._lent_size + self._own_size)
        self.address = 0
