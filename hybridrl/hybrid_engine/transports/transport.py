"""Interface of transports, which execute a plan, and code that all transports share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakMethod

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.contracts.holders import Ranks
from hybridrl.models.sources import BatchedTensor, ComputedSlice
from hybridrl.parallel.failure import PeerError

Pair = tuple[Tensor, Tensor]
"""Source and destination of a copy, two views of the same shape."""

Fill = tuple[Tensor | ComputedSlice, Tensor]
"""Like `Pair`, but the source may be a slice that must be computed first."""


@dataclass(frozen=True)
class Traffic:
    """Bytes over any kind of link, and messages, that this rank sent and received in one run.

    `node_sent_bytes` and `node_received_bytes` are exchanged with ranks on other nodes.
    """

    sent_bytes: int
    received_bytes: int
    node_sent_bytes: int
    node_received_bytes: int
    messages: int
    num_exchanges: int
    staging_bytes: int


class Transport(Protocol):
    """Copies a plan's slices between the ranks' tensors; collective."""

    def run(self) -> Traffic:
        """Fills the destination tensors, on the device's current stream."""

    def close(self) -> None:
        """Stops using the process group; must be called before the group is destroyed."""


class Peers(Ranks, Protocol):
    """All ranks of the job, as `parallel.groups.World` implements them."""

    def broadcast_object(self, value: Any, source: int) -> Any:
        """Returns the `value` of rank `source` on every rank."""

    def check(self) -> None:
        """Raises PeerError if a rank's failure has been announced to all ranks."""

    def dead_ranks(self) -> list[int]:
        """Returns the ranks whose processes have ended, as far as this rank can tell."""


class TransportError(PeerError):
    """Some weights did not arrive, so the engine must not generate."""


class ComputedCopies:
    """A list of copies whose sources are views or computed slices; implements `ops.Copies`.

    `slices` are computed one by one. Slices that are computed together belong to `copies`.
    """

    def __init__(
        self, copies: Sequence[ops.Copies], slices: Sequence[tuple[ComputedSlice, Tensor]]
    ) -> None:
        self._copies, self._slices = copies, slices

    def run(self) -> None:
        for copies in self._copies:
            copies.run()
        for one, place in self._slices:
            place.copy_(one.compute())


def copies_of(fills: Iterable[Fill], device: torch.device, programs: int | None) -> ops.Copies:
    """Returns copies from views and computed slices; see `ops.rectangle_copies` for `programs`."""
    pairs: list[Pair] = []
    slices: list[tuple[ComputedSlice, Tensor]] = []
    batches: dict[type[BatchedTensor], list[tuple[ComputedSlice, Tensor]]] = {}
    for source, place in fills:
        if isinstance(source, Tensor):
            pairs.append((source, place))
        elif isinstance(source.tensor, BatchedTensor):
            batches.setdefault(type(source.tensor), []).append((source, place))
        else:
            slices.append((source, place))
    copies = ops.rectangle_copies(pairs, device, programs=programs)
    if not slices and not batches:
        return copies
    batched = [kind.copies(batch, device, programs) for kind, batch in batches.items()]
    return ComputedCopies([copies, *batched], slices)


class AddressWatch:
    """Detects whether tensors have moved, by checking one tensor of each storage.

    Tensors with a common storage move together, and checking each one would be slow: a model's
    experts are thousands of views. No tensor may change its storage or be replaced by another one
    with the same name.
    """

    def __init__(self, *tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._asked: list[tuple[Mapping[str, Tensor], str]] = []
        self._known: list[int] | None = None

    def look_again(self) -> bool:
        """Returns whether a tensor has moved since the last call; True on the first call."""
        if self._places() == self._known:
            return False
        asked: dict[int, tuple[Mapping[str, Tensor], str]] = {}
        for group in self._tensors:
            for name, tensor in group.items():
                if tensor.numel():  # empty tensors have no address
                    asked[tensor.untyped_storage()._cdata] = group, name
        self._asked = list(asked.values())
        self._known = self._places()
        return True

    def _places(self) -> list[int]:
        return [group[name].data_ptr() for group, name in self._asked]


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.stride() == other.stride()
    )


class Repeated:
    """Enqueues the same operations in each run; on a GPU as one CUDA graph from the second run on.

    The first run enqueues them individually, because it compiles kernels and connects process
    groups. A graph replays the operations that were enqueued when it was captured, so code that
    moves a tensor must create another `Repeated`. Who waits for whom: only `capture` waits, once,
    until this rank's device is idle; it also returns PyTorch's cached blocks to the driver.

    Args:
        queue: Method that enqueues the operations on the device's current stream, allocates no
            memory, and whose tensors keep their addresses. Referenced weakly, because its object
            may own this `Repeated`.
    """

    def __init__(self, queue: Callable[[], object], device: torch.device) -> None:
        self._method, self._device = WeakMethod(queue), device
        self._graph: Any = None
        self._has_run = False

    def capture(self) -> None:
        """Captures the graph after the first run; must precede operations that wait for ranks."""
        if self._device.type == "cpu" or not self._has_run or self._graph is not None:
            return
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, may query events during the capture.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._queue()
        self._graph = graph

    def run(self) -> None:
        self.capture()
        if self._graph is not None:
            self._graph.replay()
            return
        self._queue()
        self._has_run = True

    def _queue(self) -> None:
        queue = self._method()
        assert queue is not None  # the caller of `run` or `capture` keeps the object alive
        queue()

    def close(self) -> None:
        if self._graph is not None:
            torch.cuda.synchronize(self._device)
            self._graph = None
