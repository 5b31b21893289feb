"""What every way of running a plan offers, and what it says of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.contracts.holders import Ranks
from hybridrl.models.sources import ComputedSlice
from hybridrl.parallel.failure import PeerError

Pair = tuple[Tensor, Tensor]
"""Views of equal shapes: what is copied, and where to."""

Fill = tuple[Tensor | ComputedSlice, Tensor]
"""The same, what is copied being in memory or computed first."""


@dataclass(frozen=True)
class Traffic:
    """What one run moved on this rank.

    Args:
        sent_bytes, received_bytes: over links of any kind.
        node_sent_bytes, node_received_bytes: of those, to and from ranks of other nodes.
        messages: messages sent.
        num_exchanges: exchanges gone through.
        staging_bytes: size of all staging buffers together.
    """

    sent_bytes: int
    received_bytes: int
    node_sent_bytes: int
    node_received_bytes: int
    messages: int
    num_exchanges: int
    staging_bytes: int


class Transport(Protocol):
    """Moves a plan's slices between the ranks' tensors; collective."""

    @property
    def launches(self) -> int:
        """Kernels, batches of copies and collectives that a run starts."""
        ...

    @property
    def extra_bytes(self) -> int:
        """Device memory that it holds between runs."""
        ...

    def prepare(self) -> None:
        """Makes what a run needs; `run` does so too. Not before it are the figures known."""
        ...

    def run(self) -> Traffic:
        """Fills the destination tensors, on the device's current stream."""
        ...

    def close(self) -> None:
        """Ends the use of the process group; before it is destroyed."""
        ...


class Peers(Ranks, Protocol):
    """The ranks that a plan is for, all of the job's, as `parallel.groups.World` has them."""

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Returns the `value` of rank `source` on every rank."""
        ...

    def check(self) -> None:
        """Raises PeerError if a rank is lost, which all ranks are told."""
        ...

    def dead_ranks(self) -> list[int]:
        """Returns the ranks that this one sees to have ended."""
        ...


class TransportError(PeerError):
    """The weights did not arrive: the engine has none that may be used."""


class ComputedCopies:
    """Copies of views and of computed slices; implements `ops.Copies`.

    Args:
        copies: Those of the views.
        slices: What is computed, and where it goes.
    """

    def __init__(self, copies: ops.Copies, slices: Sequence[tuple[ComputedSlice, Tensor]]) -> None:
        self._copies, self._slices = copies, slices

    @property
    def num_launches(self) -> int:
        """Kernels that a run starts, each computed slice counted as one."""
        return self._copies.num_launches + len(self._slices)

    @property
    def table_bytes(self) -> int:
        """Device memory of tables."""
        return self._copies.table_bytes

    def run(self) -> None:
        """Copies and computes everything, on the device's current stream."""
        self._copies.run()
        for one, place in self._slices:
            place.copy_(one.compute())


def copies_of(fills: Iterable[Fill], device: torch.device, programs: int | None) -> ops.Copies:
    """Returns what fills places from views and computed slices; `programs` as of
    `ops.rectangle_copies`.
    """
    pairs: list[Pair] = []
    slices: list[tuple[ComputedSlice, Tensor]] = []
    for source, place in fills:
        if isinstance(source, Tensor):
            pairs.append((source, place))
        else:
            slices.append((source, place))
    copies = ops.rectangle_copies(pairs, device, programs=programs)
    return ComputedCopies(copies, slices) if slices else copies


def addresses(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Returns where tensors lie, to be compared: tables of copies hold addresses."""
    return tuple(map(Tensor.data_ptr, tensors))


class AddressWatch:
    """Knows whether tensors have moved, by one of each storage.

    Tensors in one storage move with it: the experts of a mixture are thousands of views of a few
    tensors. So those that share a storage must stay in it, and none of them may be replaced by
    another tensor of its name.

    Args:
        tensors: by name.
    """

    def __init__(self, *tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._asked: list[tuple[Mapping[str, Tensor], str]] = []
        self._known: list[int] | None = None

    def look_again(self) -> bool:
        """Returns whether a tensor lies elsewhere than at the last look; at the first they do."""
        if self._places() == self._known:
            return False
        asked: dict[int, tuple[Mapping[str, Tensor], str]] = {}
        for group in self._tensors:
            for name, tensor in group.items():
                if tensor.numel():  # the others lie nowhere
                    asked[tensor.untyped_storage()._cdata] = group, name
        self._asked = list(asked.values())
        self._known = self._places()
        return True

    def _places(self) -> list[int]:
        return [group[name].data_ptr() for group, name in self._asked]


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    """Whether two views are the same elements at the same places."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.stride() == other.stride()
    )
