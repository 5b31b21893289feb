"""Runs a plan through bounded staging buffers and grouped exchanges (gloo or NCCL).

Who waits for whom: `run` is collective over the group. In every exchange a rank packs what it
sends, exchanges with its peers of that exchange alone, waits for its own messages and unpacks. All
ranks go through the same exchanges in the same order (chunks.py), so between two ranks there is at
most one message each way and both know its content. What came from another node for several ranks
of this one goes on in the exchange after, out of the receive buffer before that is written again.

Elements travel in one type, the narrower of what the sources and the destinations hold, and are
cast while they are packed or unpacked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.hybrid_engine.chunks import Part, schedule_exchanges
from hybridrl.hybrid_engine.plan import CopyOp, Plan, Stream
from hybridrl.models.boxes import sizes, volume
from hybridrl.models.hf import box_view

Pair = tuple[Tensor, Tensor]
"""Views of equal shapes: what is copied, and where to."""

Messages = Mapping[int, Sequence[Part]]
"""By peer, the parts of a message in order."""

Staged = Mapping[int, Sequence[tuple[Part, Tensor]]]
"""The same, each part with its place in a staging buffer, next to the one before."""


@dataclass(frozen=True)
class Traffic:
    """What one run moved on this rank.

    Args:
        sent_bytes, received_bytes: over links of any kind.
        node_sent_bytes, node_received_bytes: of those, to and from ranks of other nodes.
        messages: messages sent.
        num_exchanges: exchanges gone through.
        staging_bytes: size of both staging buffers together.
    """

    sent_bytes: int
    received_bytes: int
    node_sent_bytes: int
    node_received_bytes: int
    messages: int
    num_exchanges: int
    staging_bytes: int


class PackedTransport:
    """Moves the plan's slices between the ranks' tensors.

    Args:
        plan: the same on every rank; its itemsize is `wire_dtype`'s.
        rank: this rank, in the plan and in the group.
        sources: this rank's source tensors by name; looked up anew in every run.
        dests: this rank's destination tensors by name; written in place. Source and destination may
            be the same memory where they hold the same (alias.py); then nothing is copied.
        staging_bytes: bound of the send and the receive buffer together.
        wire_dtype: the type that elements travel in, the same on every rank (`agree_wire_dtype`).
        group: process group whose ranks the plan counts; None: the world.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        sources: Mapping[str, Tensor],
        dests: Mapping[str, Tensor],
        staging_bytes: int,
        wire_dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if plan.itemsize != wire_dtype.itemsize:
            raise ValueError(f"plan of {plan.itemsize}-byte elements, but {wire_dtype} on the wire")
        self._rank, self._group, self._dtype = rank, group, wire_dtype
        self._sources, self._dests = sources, dests
        self._domain_size = plan.domain_size
        self._local = [op for op in plan.ops[rank] if op.source_rank == rank]
        self._exchanges = schedule_exchanges(plan, rank, staging_bytes // 2)
        self._send_elements = max((_elements(x.sends) for x in self._exchanges), default=0)
        self._receive_elements = max((_elements(x.receives) for x in self._exchanges), default=0)

    @torch.no_grad()
    def run(self) -> Traffic:
        """Fills the destination tensors; collective over the group."""
        _copy(self._local_pairs())
        send = self._buffer(self._send_elements, self._sources)
        receive = self._buffer(self._receive_elements, self._dests)
        sent: Counter[bool] = Counter()  # bytes, by whether to another node
        received: Counter[bool] = Counter()
        messages = 0
        held: Mapping[Stream, Tensor] = {}
        for exchange in self._exchanges:
            outgoing, incoming = _staged(exchange.sends, send), _staged(exchange.receives, receive)
            _copy(self._pack_pairs(outgoing, held))
            transfers = []
            for peer, parts in outgoing.items():
                transfers.append(self._transfer(dist.isend, parts, peer))
                sent[self._is_far(peer)] += transfers[-1].tensor.nbytes
            messages += len(transfers)
            for peer, parts in incoming.items():
                transfers.append(self._transfer(dist.irecv, parts, peer))
                received[self._is_far(peer)] += transfers[-1].tensor.nbytes
            # The buffers are written again in the next exchange: both ways must be through first.
            for work in dist.batch_isend_irecv(transfers) if transfers else ():
                work.wait()
            _copy(self._unpack_pairs(incoming))
            held = {part.stream: place for part, place in chain(*incoming.values())}
        return Traffic(
            sent_bytes=sent.total(),
            received_bytes=received.total(),
            node_sent_bytes=sent[True],
            node_received_bytes=received[True],
            messages=messages,
            num_exchanges=len(self._exchanges),
            staging_bytes=send.nbytes + receive.nbytes,
        )

    def _buffer(self, elements: int, tensors: Mapping[str, Tensor]) -> Tensor:
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        return torch.empty(elements, dtype=self._dtype, device=device)

    def _is_far(self, peer: int) -> bool:
        return peer // self._domain_size != self._rank // self._domain_size

    def _transfer(self, kind: Any, parts: Sequence[tuple[Part, Tensor]], peer: int) -> dist.P2POp:
        message = parts[0][1].as_strided((sum(len(place) for _, place in parts),), (1,))
        # As bytes, so that every backend carries every type.
        world_rank = dist.get_global_rank(self._group, peer) if self._group is not None else peer
        return dist.P2POp(kind, message.view(torch.uint8), world_rank, self._group)

    def _local_pairs(self) -> Iterator[Pair]:
        for op in self._local:
            source = box_view(self._sources[op.source], op.source_box)
            dest = box_view(self._dests[op.dest], op.dest_box)
            if not _is_same_memory(source, dest):
                yield source, dest

    def _pack_pairs(self, messages: Staged, held: Mapping[Stream, Tensor]) -> Iterator[Pair]:
        for part, place in chain(*messages.values()):
            if part.stream.source != self._rank:
                yield held[part.stream], place
            for op, staged in _shaped(part, place):
                yield box_view(self._sources[op.source], op.source_box), staged

    def _unpack_pairs(self, messages: Staged) -> Iterator[Pair]:
        for part, place in chain(*messages.values()):
            for op, staged in _shaped(part, place):
                yield staged, box_view(self._dests[op.dest], op.dest_box)


def agree_wire_dtype(
    sources: Mapping[str, Tensor],
    dests: Mapping[str, Tensor],
    group: dist.ProcessGroup | None = None,
) -> torch.dtype:
    """Returns the type in which all ranks send elements: the narrower of the widest types.

    The widest type among all sources, or among all destinations if that is narrower, so that no
    value loses more than its destination's type makes it lose. Collective over the group.
    """
    gathered = gather_objects((_widest(sources), _widest(dests)), group)
    held = [source for source, _ in gathered if source is not None]
    wanted = [dest for _, dest in gathered if dest is not None]
    source, dest = _promoted(held), _promoted(wanted)
    return dest if dest.itemsize < source.itemsize else source


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns every rank's small picklable `value`, in rank order; collective over the group."""
    if not dist.is_initialized():
        return [value]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group)
    return gathered


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.stride() == other.stride()
    )


def _copy(pairs: Iterable[Pair]) -> None:
    for source, dest in pairs:
        dest.copy_(source)


def _staged(messages: Messages, buffer: Tensor) -> Staged:
    """Lays the messages' parts into a buffer, one after the other."""
    counts = [part.elements for part in chain(*messages.values())]
    places = iter(buffer[: sum(counts)].split(counts))
    return {peer: [(part, next(places)) for part in parts] for peer, parts in messages.items()}


def _shaped(part: Part, place: Tensor) -> Iterator[tuple[CopyOp, Tensor]]:
    """Yields a part's pieces, each with where it lies in a buffer as a tensor of its shape."""
    if part.pieces:
        counts = [volume(op.dest_box) for op in part.pieces]
        for op, staged in zip(part.pieces, place.split(counts), strict=True):
            yield op, staged.view(sizes(op.dest_box))


def _elements(messages: Messages) -> int:
    return sum(part.elements for parts in messages.values() for part in parts)


def _widest(tensors: Mapping[str, Tensor]) -> torch.dtype | None:
    return _promoted([t.dtype for t in tensors.values()]) if tensors else None


def _promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest
