"""Runs a plan through bounded staging buffers and one grouped exchange a chunk (gloo or NCCL).

Who waits for whom: `run` is collective over the group. In every chunk a rank packs what it sends,
exchanges with the peers of that chunk alone, waits for its own messages and unpacks. All ranks go
through the same chunks in the same order (chunks.py), so between two ranks there is at most one
message each way a chunk and both know its content. A rank with nothing to do in a chunk passes on.

Elements travel in one type, the narrower of what the sources and the destinations hold, and are
cast while they are packed or unpacked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.hybrid_engine.chunks import schedule_chunks
from hybridrl.hybrid_engine.plan import CopyOp, Plan
from hybridrl.models.boxes import sizes, volume
from hybridrl.models.hf import box_view


@dataclass(frozen=True)
class Traffic:
    """What one run moved on this rank.

    Args:
        sent_bytes, received_bytes: over the link.
        messages: messages sent.
        num_chunks: exchanges gone through.
        staging_bytes: size of both staging buffers together.
    """

    sent_bytes: int
    received_bytes: int
    messages: int
    num_chunks: int
    staging_bytes: int


@dataclass(frozen=True)
class _Chunk:
    """This rank's part of one chunk: for each peer the pieces of one message, in order."""

    sends: dict[int, list[CopyOp]]
    receives: dict[int, list[CopyOp]]

    @property
    def send_elements(self) -> int:
        return _elements(self.sends)

    @property
    def receive_elements(self) -> int:
        return _elements(self.receives)


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
        self._local = [op for op in plan.ops[rank] if op.source_rank == rank]
        chunks = schedule_chunks(plan, staging_bytes // 2)
        self._chunks = [_own_part(pieces, rank) for pieces in chunks]
        self._send_elements = max((c.send_elements for c in self._chunks), default=0)
        self._receive_elements = max((c.receive_elements for c in self._chunks), default=0)

    @torch.no_grad()
    def run(self) -> Traffic:
        """Fills the destination tensors; collective over the group."""
        for op in self._local:
            source = box_view(self._sources[op.source], op.source_box)
            dest = box_view(self._dests[op.dest], op.dest_box)
            if not _is_same_memory(source, dest):
                dest.copy_(source)
        sent = received = messages = 0
        send = self._buffer(self._send_elements, self._sources)
        receive = self._buffer(self._receive_elements, self._dests)
        for chunk in self._chunks:
            offset, transfers = 0, []
            for peer, pieces in chunk.sends.items():
                stop = self._pack(pieces, send, offset)
                transfers.append(self._transfer(dist.isend, send[offset:stop], peer))
                offset = stop
            sent += offset
            messages += len(transfers)
            offset = 0
            for peer, pieces in chunk.receives.items():
                stop = offset + sum(volume(piece.dest_box) for piece in pieces)
                transfers.append(self._transfer(dist.irecv, receive[offset:stop], peer))
                offset = stop
            received += offset
            # The buffers are used again in the next chunk: both directions must be through first.
            for work in dist.batch_isend_irecv(transfers) if transfers else ():
                work.wait()
            self._unpack(chunk.receives, receive)
        item = self._dtype.itemsize
        staging = (send.numel() + receive.numel()) * item
        return Traffic(sent * item, received * item, messages, len(self._chunks), staging)

    def _buffer(self, elements: int, tensors: Mapping[str, Tensor]) -> Tensor:
        device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
        return torch.empty(elements, dtype=self._dtype, device=device)

    def _transfer(self, kind: Any, part: Tensor, peer: int) -> dist.P2POp:
        # As bytes, so that every backend carries every type.
        world_rank = dist.get_global_rank(self._group, peer) if self._group is not None else peer
        return dist.P2POp(kind, part.view(torch.uint8), world_rank, self._group)

    def _pack(self, pieces: Sequence[CopyOp], buffer: Tensor, offset: int) -> int:
        """Packs one message into `buffer` from `offset` on; returns where it ends."""
        for piece in pieces:
            stop = offset + volume(piece.source_box)
            part = buffer[offset:stop].view(sizes(piece.source_box))
            part.copy_(box_view(self._sources[piece.source], piece.source_box))
            offset = stop
        return offset

    def _unpack(self, messages: Mapping[int, Sequence[CopyOp]], buffer: Tensor) -> None:
        offset = 0
        for pieces in messages.values():
            for piece in pieces:
                stop = offset + volume(piece.dest_box)
                part = buffer[offset:stop].view(sizes(piece.dest_box))
                box_view(self._dests[piece.dest], piece.dest_box).copy_(part)
                offset = stop


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


def _own_part(pieces: Sequence[CopyOp], rank: int) -> _Chunk:
    sends: dict[int, list[CopyOp]] = {}
    receives: dict[int, list[CopyOp]] = {}
    for piece in pieces:
        if piece.source_rank == rank:
            sends.setdefault(piece.dest_rank, []).append(piece)
        elif piece.dest_rank == rank:
            receives.setdefault(piece.source_rank, []).append(piece)
    return _Chunk(sends, receives)


def _elements(messages: Mapping[int, Sequence[CopyOp]]) -> int:
    return sum(volume(piece.dest_box) for pieces in messages.values() for piece in pieces)


def _widest(tensors: Mapping[str, Tensor]) -> torch.dtype | None:
    return _promoted([t.dtype for t in tensors.values()]) if tensors else None


def _promoted(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    widest = dtypes[0]
    for dtype in dtypes[1:]:
        widest = torch.promote_types(widest, dtype)
    return widest
