"""Proof on demand that what arrived is what was sent: checksums of both ends of every copy.

Who waits for whom: `verify` is collective. Every rank sums up the slices that it is
the source of and those that it received, and all compare. The plan is proven to be right before it
runs (proof.py); this finds what a proof cannot: a broken transport, a parameter that an engine
repacked, memory that something else overwrote.

A quantized parameter's slice is quantized at its source too, and bits and scales are compared. The
scale of a block that lies in several slices is the largest of theirs, which the sources tell each
other first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.hybrid_engine.planning.plan import CopyOp, Plan
from hybridrl.hybrid_engine.transports.quantized import blocks_of, blocks_shape, is_whole
from hybridrl.hybrid_engine.transports.transport import Peers
from hybridrl.models.boxes import Box
from hybridrl.models.hf.shards import box_view

Key = tuple[int, int]
"""A copy: the rank that receives it, and its number among that rank's copies."""

BYTES_OF = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 22  # elements summed up at once: intermediates are 8 bytes each, and memory is full


class VerifyError(RuntimeError):
    """An engine parameter differs from the training weights that it was written from."""


def verify(
    plan: Plan,
    peers: Peers,
    sources: Mapping[str, Tensor],
    dests: Mapping[str, Tensor],
    wire_dtype: torch.dtype,
    scales: Mapping[str, Tensor] | None = None,
) -> None:
    """Compares every slice at its source, cast as on its way, with the slice where it arrived.

    Args: as of `PackedTransport`.

    Raises:
        VerifyError: on every rank, naming the parameter, the element range and both ranks.
    """
    scales, rank = scales or {}, peers.rank
    dtypes: list[dict[str, torch.dtype]] = peers.gather_objects(
        {name: tensor.dtype for name, tensor in dests.items()}
    )
    quantized = _Quantized(plan, rank, sources, wire_dtype)
    quantized.agree({name: tuple(dests[name].shape) for name in scales}, peers)
    sent: dict[Key, Tensor] = {}
    summed: dict[tuple[object, ...], Tensor] = {}  # a slice that many receive is summed up once
    for dest_rank, copies in enumerate(plan.ops):
        for number, op in enumerate(copies):
            if op.source_rank != rank:
                continue
            if op.dest in quantized.shapes[dest_rank]:
                sent[dest_rank, number] = quantized.checksum(op)
                continue
            wire = None if dest_rank == rank else wire_dtype
            dtype = dtypes[dest_rank][op.dest]
            what = (op.source, op.source_box, wire, dtype)
            if what not in summed:
                part = box_view(sources[op.source], op.source_box)
                part = part if wire is None else part.to(wire)
                summed[what] = checksum(part.to(dtype))
            sent[dest_rank, number] = summed[what]
    arrived = {}
    for number, op in enumerate(plan.ops[rank]):
        found = checksum(box_view(dests[op.dest], op.dest_box))
        if op.dest in scales:
            found = _with_scales(found, box_view(scales[op.dest], blocks_of(op.dest_box)))
        arrived[rank, number] = found
    _compare(plan, peers.gather_objects((_read(sent), _read(arrived))))


def _compare(plan: Plan, told: list[tuple[dict[Key, int], dict[Key, int]]]) -> None:
    """Raises VerifyError if what some rank sent is not what arrived."""
    expected = {key: value for part, _ in told for key, value in part.items()}
    found = {key: value for _, part in told for key, value in part.items()}
    for dest_rank, number in sorted(found):
        if found[dest_rank, number] != expected[dest_rank, number]:
            op = plan.ops[dest_rank][number]
            raise VerifyError(
                f"{op.dest}{list(op.dest_box)} of the engine on rank {dest_rank} differs from "
                f"{op.source}{list(op.source_box)} of the model on rank {op.source_rank}"
            )


class _Quantized:
    """Quantizes this rank's slices as their destinations must have done it.

    Attributes:
        shapes: of each rank's quantized parameters, by name; once agreed upon.
    """

    def __init__(
        self, plan: Plan, rank: int, sources: Mapping[str, Tensor], wire_dtype: torch.dtype
    ) -> None:
        self._plan, self._rank, self._sources, self._dtype = plan, rank, sources, wire_dtype
        self.shapes: list[dict[str, tuple[int, ...]]] = []
        self._shared: dict[tuple[int, str], Tensor] = {}  # scales of blocks in several slices
        self._summed: dict[tuple[object, ...], Tensor] = {}

    def agree(self, shapes: dict[str, tuple[int, ...]], peers: Peers) -> None:
        """Tells all what this rank's quantized parameters are, and what its slices of blocks that
        others have slices of too make of their scales; collective.

        A scale is 4 bytes for 16384 elements, and is told only where slices are not whole blocks.
        """
        self.shapes = peers.gather_objects(shapes)
        if not any(self.shapes):
            return
        own: dict[Key, Tensor] = {}
        for dest_rank, copies in enumerate(self._plan.ops):
            for number, op in enumerate(copies):
                if op.source_rank == self._rank and self._is_shared(op):
                    own[dest_rank, number] = self._scales(op).cpu()
        for part in peers.gather_objects(own):
            for (dest_rank, number), found in part.items():
                op = self._plan.ops[dest_rank][number]
                shape = blocks_shape(self.shapes[dest_rank][op.dest])
                shared = self._shared.setdefault((dest_rank, op.dest), torch.zeros(shape))
                view = box_view(shared, blocks_of(op.dest_box))
                torch.maximum(view, found, out=view)

    def checksum(self, op: CopyOp) -> Tensor:
        """Returns the checksum of a slice and its scales as they must have arrived."""
        shared = self._shared.get((op.dest_rank, op.dest)) if self._is_shared(op) else None
        what = op.source, op.source_box, op.dest_box if shared is None else op
        if what not in self._summed:
            source = self._sources[op.source]
            if shared is None:
                scales = self._scales(op)
            else:
                scales = box_view(shared, blocks_of(op.dest_box)).to(source.device)
            first = blocks_of(op.dest_box)[-2][0]
            parts = []
            for part, box in self._bands(op):
                rows = slice(*(row - first for row in blocks_of(box)[-2]))
                place = box[-2][0] % ops.BLOCK, box[-1][0] % ops.BLOCK
                parts.append(ops.quantize_blocks(part, scales[..., rows, :], *place))
            bits = torch.cat([part.view(torch.uint8) for part in parts], -2)
            self._summed[what] = _with_scales(checksum(bits), scales)
        return self._summed[what]

    def _is_shared(self, op: CopyOp) -> bool:
        shape = self.shapes[op.dest_rank].get(op.dest)
        return shape is not None and not is_whole(op.dest_box, shape)

    def _scales(self, op: CopyOp) -> Tensor:
        """Returns the scales that a slice asks of the blocks that it touches."""
        bands = (
            ops.block_scales(part, box[-2][0] % ops.BLOCK, box[-1][0] % ops.BLOCK)
            for part, box in self._bands(op)
        )
        return torch.cat(list(bands), -2)

    def _bands(self, op: CopyOp) -> Iterator[tuple[Tensor, Box]]:
        """Yields a slice in bands of whole rows of blocks, cast, and where each goes."""
        (start, stop), (left, right) = op.dest_box[-2:]
        height = max(CHUNK // (ops.BLOCK * (right - left)), 1) * ops.BLOCK
        edges = [start, *range(start // ops.BLOCK * ops.BLOCK + height, stop, height), stop]
        part = box_view(self._sources[op.source], op.source_box)
        for a, b in pairwise(edges):
            band = part[..., a - start : b - start, :].to(self._dtype)
            yield band, (*op.dest_box[:-2], (a, b), (left, right))


def _with_scales(total: Tensor, scales: Tensor) -> Tensor:
    """Returns a checksum that covers a slice's scales too."""
    return total + 3 * checksum(scales)


def checksum(part: Tensor) -> Tensor:
    """Returns a number, int64 on the part's device, that changes when a bit does, or when two
    elements swap places.
    """
    words = part.contiguous().view(BYTES_OF[part.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=part.device)
    for start in range(0, words.numel(), CHUNK):
        piece = words[start : start + CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + piece.numel(), device=part.device)
        # Odd multipliers of the place: each term is a one-to-one function of its word mod 2^64.
        total += (piece * (place * 2 * 2654435761 + 1)).sum()
    return total


def _read(sums: Mapping[Key, Tensor]) -> dict[Key, int]:
    """Returns the numbers on the host; one sync point for all of them."""
    if not sums:
        return {}
    return dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True))
