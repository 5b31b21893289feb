"""Cuts a plan's transfers into chunks that fit bounded staging buffers. Pure, no torch.

Invariant: within one chunk no rank sends more than the capacity, and none receives more. Every rank
computes the same chunks, so all agree on what one message holds and in which order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from hybridrl.hybrid_engine.plan import CopyOp, Plan, PlanError
from hybridrl.models.boxes import Box, sizes, volume

# Operations are cut to this part of the capacity, so that a chunk takes pieces of several peers.
PIECES_PER_CHUNK = 4


def schedule_chunks(plan: Plan, capacity_bytes: int) -> list[list[CopyOp]]:
    """Returns, chunk by chunk, the pieces of the plan's operations between different ranks.

    Each piece goes into the first chunk, not before the last piece between the same two ranks, in
    which its sender and its receiver both have room.

    Args:
        plan: whose local operations are left out.
        capacity_bytes: most that one rank sends, and most that it receives, in one chunk.

    Raises:
        PlanError: not even one element fits.
    """
    capacity = capacity_bytes // plan.itemsize
    if capacity < 1:
        raise PlanError(f"staging of {capacity_bytes} bytes holds no element of {plan.itemsize}")
    largest = max(capacity // PIECES_PER_CHUNK, 1)
    chunks: list[list[CopyOp]] = []
    sent: defaultdict[tuple[int, int], int] = defaultdict(int)
    received: defaultdict[tuple[int, int], int] = defaultdict(int)
    earliest: defaultdict[tuple[int, int], int] = defaultdict(int)
    for ops in plan.ops:
        for op in ops:
            if op.source_rank == op.dest_rank:
                continue
            pair = (op.source_rank, op.dest_rank)
            for piece in _pieces(op, largest):
                room = capacity - volume(piece.dest_box)
                chunk = earliest[pair]
                while sent[pair[0], chunk] > room or received[pair[1], chunk] > room:
                    chunk += 1
                sent[pair[0], chunk] += capacity - room
                received[pair[1], chunk] += capacity - room
                earliest[pair] = chunk
                chunks += [[] for _ in range(chunk + 1 - len(chunks))]
                chunks[chunk].append(piece)
    return chunks


def _pieces(op: CopyOp, largest: int) -> Iterator[CopyOp]:
    """Yields an operation in pieces of at most `largest` elements, in order."""
    if volume(op.dest_box) <= largest:
        yield op
        return
    # Runs of slices of the outermost dim whose slices fit, at each single index of the dims before.
    extents = sizes(op.dest_box)
    dim, inner = len(extents) - 1, 1
    while dim and inner * extents[dim] <= largest:
        inner *= extents[dim]
        dim -= 1
    step = largest // inner
    yield from _split(op, 0, dim, step)


def _split(op: CopyOp, dim: int, last: int, step: int) -> Iterator[CopyOp]:
    extent = sizes(op.dest_box)[dim]
    size = step if dim == last else 1
    for start in range(0, extent, size):
        stop = min(start + size, extent)
        part = op._replace(
            source_box=_part(op.source_box, dim, start, stop),
            dest_box=_part(op.dest_box, dim, start, stop),
        )
        if dim == last:
            yield part
        else:
            yield from _split(part, dim + 1, last, step)


def _part(box: Box, dim: int, start: int, stop: int) -> Box:
    origin = box[dim][0]
    return (*box[:dim], (origin + start, origin + stop), *box[dim + 1 :])
