"""Executes a plan with staging buffers of bounded size and grouped messages (gloo or NCCL).

Who waits for whom: `run` is collective. In every exchange a rank packs its messages, exchanges
messages with its peers in that exchange only, and unpacks the received messages. All ranks run the
same exchanges in the same order (chunks.py). In an exchange, a rank sends at most one message to
each peer, and sender and receiver know the message's content. If several ranks of a node need the
same data from another node, one of them receives it and forwards it in the next exchange, before
its receive buffer is overwritten.

Blocks of at least 32 MiB that are contiguous in both source and destination are sent without
staging, as one group of messages that overlaps the exchanges (direct.py).

There are two send and two receive buffers. On GPUs, packing, exchanging and unpacking use separate
streams: while one exchange is in flight, the next one is packed and the previous one unpacked.
Local copies run at the same time. Every run enqueues the same operations, so from the second run on
they are launched as one CUDA graph, which is captured again if tensors move. A run then allocates
no memory, and the host does no work per tensor or message.

All elements are sent in one type, the narrower of the sources' type and the destinations' type.
Elements are cast while they are packed or unpacked.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl import ops
from hybridrl.hybrid_engine.planning.chunks import Part, schedule_exchanges
from hybridrl.hybrid_engine.planning.direct import Direct, agree_on_all
from hybridrl.hybrid_engine.planning.plan import CopyOp, Plan, Stream
from hybridrl.hybrid_engine.planning.wire_elements import fixed_sizes
from hybridrl.hybrid_engine.transports.transport import (
    Fill,
    Peers,
    Repeated,
    Traffic,
    copies_of,
    is_same_memory,
)
from hybridrl.models.boxes import box_view, sizes, volume
from hybridrl.models.sources import ComputedSlice, SourceTensor, memory_of, slice_of
from hybridrl.models.weights import RankLayout

# Number of programs of each kernel that packs, unpacks or copies. The number is limited because
# NCCL's kernels must wait while other kernels occupy the whole device. With this number the copies
# reach 2 TB/s, five times NVLink's rate.
PROGRAMS = 64
SLOTS = 2  # buffers per direction: one is in flight while the other is packed or unpacked

Messages = Mapping[int, Sequence[Part]]
"""For each peer, the parts of its message, in order."""

Staged = Mapping[int, Sequence[tuple[Part, Tensor]]]
"""Like `Messages`, but each part has its slice of a staging buffer; the slices are consecutive."""


@dataclass(frozen=True)
class _Step:
    """This rank's operations in one exchange, ready to be enqueued.

    `pack` fills the send buffer, partly from the previous receive buffer if `reads_last`; `unpack`
    empties the receive buffer.
    """

    pack: ops.Copies
    reads_last: bool
    transfers: Sequence[dist.P2POp]
    unpack: ops.Copies


class PackedTransport:
    """Copies the plan's slices between the ranks' tensors in packed messages.

    Args:
        plan: Plan, the same on every rank; its itemsize equals the size of `wire_dtype`.
        sources: This rank's source tensors by name. Computed slices are written directly into
            messages and destinations.
        dests: This rank's destination tensors by name; written in place. If a destination shares
            its memory with the source of the same content (alias.py), nothing is copied.
        wire_dtype: Type in which elements are sent, the same on every rank (`agree_wire_dtype`).
        block_group: Process group of all ranks for large blocks. Without it, blocks do not overlap
            the exchanges, because a communicator runs its messages in order.
        direct: Operations that need no staging; None for the ranks to agree on them.
    """

    def __init__(
        self,
        plan: Plan,
        peers: Peers,
        sources: Mapping[str, SourceTensor],
        dests: Mapping[str, Tensor],
        staging_bytes: int,
        wire_dtype: torch.dtype,
        block_group: dist.ProcessGroup | None = None,
        direct: Direct | None = None,
    ) -> None:
        if plan.itemsize != wire_dtype.itemsize:
            raise ValueError(
                f"the plan's elements have {plan.itemsize} bytes, but they are sent as {wire_dtype}"
            )
        self._rank, self._dtype = peers.rank, wire_dtype
        self._sources, self._dests = sources, dests
        self._domain_size = plan.domain_size
        self._programs = PROGRAMS if plan.streams else None
        self._local_ops = [op for op in plan.ops[self._rank] if op.source_rank == self._rank]
        if direct is None:  # the same on all ranks: agreeing is collective
            (direct,) = agree_on_all([plan], peers, sources, [dests], wire_dtype)
        self._direct = direct
        capacity = staging_bytes // (2 * SLOTS)
        self._exchanges = schedule_exchanges(
            plan, self._rank, capacity, direct.ops, direct.elements
        )
        self._device = _one_device(sources, dests)
        self._buffers: tuple[list[Tensor], list[Tensor]] | None = None
        self._addresses: tuple[int, ...] | None = None
        self._work = Repeated(self._queue, self._device)
        self._block_group = block_group
        self._copying: torch.cuda.Stream | None = None
        self._directing: torch.cuda.Stream | None = None
        self._unpacking: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._copying, self._directing, self._unpacking = (
                torch.cuda.Stream(self._device) for _ in range(3)
            )
            self._unpacked = [torch.cuda.Event() for _ in range(SLOTS)]

    @torch.no_grad()
    def run(self) -> Traffic:
        self._prepare()
        if self._steps or self._blocks:
            self._work.run()
        else:
            self._queue()
        return self._traffic

    def close(self) -> None:
        self._work.close()

    def _prepare(self) -> None:
        """Creates buffers, tables and messages; creates them again only if a tensor has moved."""
        # All tensors are checked, because any source may have been replaced by another tensor with
        # the same name.
        found = tuple(
            map(Tensor.data_ptr, chain(memory_of(self._sources.values()), self._dests.values()))
        )
        if found == self._addresses:
            return
        self._addresses = found
        self._work = Repeated(self._queue, self._device)
        self._local = self._copies(self._local_pairs())
        self._steps = []
        self._blocks = list(self._block_transfers())
        sent: Counter[bool] = Counter()  # bytes sent to this node (False) and to other nodes (True)
        received: Counter[bool] = Counter()
        send, receive = self._staging()
        held: Mapping[Stream, Tensor] = {}
        for number, exchange in enumerate(self._exchanges):
            slot = number % SLOTS
            outgoing = _staged(exchange.sends, send[slot])
            incoming = _staged(exchange.receives, receive[slot])
            self._steps.append(self._step(outgoing, incoming, held))
            held = {part.stream: place for part, place in chain(*incoming.values())}
        for transfer in chain(self._blocks, *(step.transfers for step in self._steps)):
            counter = sent if transfer.op is dist.isend else received
            is_far = transfer.group_peer // self._domain_size != self._rank // self._domain_size
            counter[is_far] += transfer.tensor.nbytes
        self._traffic = Traffic(
            sent_bytes=sent.total(),
            received_bytes=received.total(),
            node_sent_bytes=sent[True],
            node_received_bytes=received[True],
            messages=sum(len(exchange.sends) for exchange in self._exchanges)
            + sum(map(len, self._direct.sends.values())),
            num_exchanges=len(self._exchanges),
            staging_bytes=sum(buffer.nbytes for buffer in (*send, *receive)),
        )

    def _queue(self) -> None:
        """Enqueues all operations of a run without waiting; on CPU they run one by one."""
        if self._blocks:
            with self._aside(self._directing):
                self._wait(dist.batch_isend_irecv(self._blocks))
        with self._aside(self._copying):
            self._local.run()
        works: list[Sequence[dist.Work]] = []
        for number, step in enumerate(self._steps):
            slot = number % SLOTS
            if number >= SLOTS:  # both buffers of this slot must be reusable
                self._wait(works[number - SLOTS])
                if self._device.type == "cuda":
                    torch.cuda.current_stream().wait_event(self._unpacked[slot])
            if step.reads_last:
                self._wait(works[number - 1])
            step.pack.run()
            works.append(dist.batch_isend_irecv(list(step.transfers)) if step.transfers else ())
            with self._aside(self._unpacking):
                self._wait(works[number])
                step.unpack.run()
                if self._device.type == "cuda":
                    self._unpacked[slot].record()
            if self._device.type == "cpu":
                works[number] = ()  # gloo's work may only be waited for once
        beside = [self._copying]
        beside += [self._directing] if self._blocks else []
        beside += [self._unpacking] if self._steps else []
        for stream in beside:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)

    def _wait(self, works: Sequence[dist.Work]) -> None:
        """Makes operations that are enqueued later wait for the messages; on CPU, waits here."""
        for work in works:
            work.wait()

    def _aside(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
        """Enqueues a `with` block on another stream, after work already on the current stream."""
        if stream is None:
            return nullcontext()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    def _staging(self) -> tuple[list[Tensor], list[Tensor]]:
        if self._buffers is None:
            send = max((_elements(x.sends) for x in self._exchanges), default=0)
            receive = max((_elements(x.receives) for x in self._exchanges), default=0)
            slots = min(SLOTS, len(self._exchanges))
            self._buffers = (
                [self._buffer(send) for _ in range(slots)],
                [self._buffer(receive) for _ in range(slots)],
            )
        return self._buffers

    def _buffer(self, elements: int) -> Tensor:
        return torch.empty(elements, dtype=self._dtype, device=self._device)

    def _step(self, outgoing: Staged, incoming: Staged, held: Mapping[Stream, Tensor]) -> _Step:
        sends = [self._transfer(dist.isend, parts, peer) for peer, parts in outgoing.items()]
        receives = [self._transfer(dist.irecv, parts, peer) for peer, parts in incoming.items()]
        sources = {part.stream.source for part, _ in chain(*outgoing.values())}
        return _Step(
            self._copies(self._pack_pairs(outgoing, held)),
            bool(sources - {self._rank}),
            sends + receives,
            self._copies(self._unpack_pairs(incoming)),
        )

    def _copies(self, fills: Iterator[Fill]) -> ops.Copies:
        return copies_of(fills, self._device, self._programs)

    def _transfer(self, kind: Any, parts: Sequence[tuple[Part, Tensor]], peer: int) -> dist.P2POp:
        message = parts[0][1].as_strided((sum(len(place) for _, place in parts),), (1,))
        # Sent as bytes, because not every backend supports every type.
        return dist.P2POp(kind, message.view(torch.uint8), group_peer=peer)

    def _block_transfers(self) -> Iterator[dist.P2POp]:
        group = self._block_group
        for is_send, by_peer in ((True, self._direct.sends), (False, self._direct.receives)):
            for peer, op in ((peer, op) for peer, blocks in by_peer.items() for op in blocks):
                tensors, name, box = (
                    (self._sources, op.source, op.source_box)
                    if is_send
                    else (self._dests, op.dest, op.dest_box)
                )
                block = slice_of(tensors[name], box)
                assert isinstance(block, Tensor)  # only tensors in memory skip staging
                message = block.reshape(-1).view(torch.uint8)
                kind = dist.isend if is_send else dist.irecv
                yield dist.P2POp(kind, message, group=group, group_peer=peer)

    def _local_pairs(self) -> Iterator[Fill]:
        for op in self._local_ops:
            source = slice_of(self._sources[op.source], op.source_box)
            dest = box_view(self._dests[op.dest], op.dest_box)
            if isinstance(source, ComputedSlice) or not is_same_memory(source, dest):
                yield source, dest

    def _pack_pairs(self, messages: Staged, held: Mapping[Stream, Tensor]) -> Iterator[Fill]:
        for part, place in chain(*messages.values()):
            if part.stream.source != self._rank:
                yield held[part.stream], place
            for op, staged in _shaped(part, place):
                yield slice_of(self._sources[op.source], op.source_box), staged

    def _unpack_pairs(self, messages: Staged) -> Iterator[Fill]:
        for part, place in chain(*messages.values()):
            for op, staged in _shaped(part, place):
                yield staged, box_view(self._dests[op.dest], op.dest_box)


def _one_device(sources: Mapping[str, SourceTensor], dests: Mapping[str, Tensor]) -> torch.device:
    """Returns the device of all tensors; ValueError if they are on different devices."""
    found: torch.device | None = None
    sides: tuple[tuple[str, Mapping[str, SourceTensor]], ...]
    sides = ("the trainer", sources), ("the engine", dests)
    for side, tensors in sides:
        for name, tensor in tensors.items():
            found = found or tensor.device
            if tensor.device != found:
                raise ValueError(
                    f"{name} of {side} is on {tensor.device}, but other tensors are on {found}"
                )
    return found or torch.device("cpu")


def make_block_group(peers: Peers, timeout_s: float) -> dist.ProcessGroup | None:
    """Creates the process group for large blocks during exchanges; collective.

    The group's collectives time out after `timeout_s` seconds. Returns None on CPU or with a single
    rank.
    """
    if not torch.cuda.is_available() or peers.size == 1:
        return None
    group = dist.new_group(timeout=datetime.timedelta(seconds=timeout_s))
    # A group's first collective must involve all of its ranks, but blocks are sent between only
    # some of them.
    dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
    return group


def agree_wire_dtype(
    sources: Mapping[str, SourceTensor],
    dests: Mapping[str, Tensor],
    peers: Peers,
    layouts: tuple[RankLayout, RankLayout],
) -> torch.dtype:
    """Returns the type in which all ranks send elements; collective.

    It is the widest type of all sources or of all destinations, whichever is narrower, so no value
    loses more precision than its destination requires. `fixed_sizes` are ignored.
    """
    fixed = [fixed_sizes(layout) for layout in layouts]
    widest = (
        _widest([tensor for name, tensor in sources.items() if name not in fixed[0]]),
        _widest([tensor for name, tensor in dests.items() if name not in fixed[1]]),
    )
    dtypes = peers.gather_objects(widest)
    held = [source for source, _ in dtypes if source is not None]
    wanted = [dest for _, dest in dtypes if dest is not None]
    source, dest = _promoted(held), _promoted(wanted)
    return dest if dest.itemsize < source.itemsize else source


def _staged(messages: Messages, buffer: Tensor) -> Staged:
    """Assigns consecutive slices of a buffer to the messages' parts."""
    counts = [part.elements for part in chain(*messages.values())]
    places = iter(buffer[: sum(counts)].split(counts))
    return {peer: [(part, next(places)) for part in parts] for peer, parts in messages.items()}


def _shaped(part: Part, place: Tensor) -> Iterator[tuple[CopyOp, Tensor]]:
    if part.pieces:
        counts = [volume(op.dest_box) for op in part.pieces]
        for op, staged in zip(part.pieces, place.split(counts), strict=True):
            yield op, staged.view(sizes(op.dest_box))


def _elements(messages: Messages) -> int:
    return sum(part.elements for parts in messages.values() for part in parts)


def _widest(tensors: Sequence[SourceTensor]) -> torch.dtype | None:
    return _promoted([t.dtype for t in tensors]) if tensors else None


def _promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest
