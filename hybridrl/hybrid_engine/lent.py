"""Room for blocks on their way, lent by destinations whose own content comes last.

Copy engines copy what is in one piece at both ends. A row-parallel weight's slice is in one piece
at its source and cut into rows at its destination: it can land anywhere on this rank and be put in
place by a kernel that reads this rank's memory only. No memory is needed for that: parts of other
destinations will be overwritten anyway. In this order:

    staged: slices to be cut up land in the lenders' destinations
    plain: all other blocks, and while they travel, what was staged is put in place
    lenders: these blocks come last
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybridrl.hybrid_engine.transport import Pair

ALIGNMENT = 16  # bytes; of the widest loads


class Lent(NamedTuple):
    """Pairs of (source, destination).

    staged: source, room; unpacked: room, destination, after all of `staged`; plain: at any time;
    lenders: after all of `unpacked`; without_room: which of the given pairs found none, and are to
    be copied in another way.
    """

    staged: list[Pair]
    unpacked: list[Pair]
    plain: list[Pair]
    lenders: list[Pair]
    without_room: list[int]


def lend(pairs: Sequence[Pair]) -> Lent:
    """Finds room for the pairs whose destination is not in one piece.

    No more is staged than is plain, so that the kernel which puts it in place has that long.

    Args:
        pairs: sources in one piece, of their destinations' types, in the order of their transfer,
            which each result keeps; destinations do not overlap.
    """
    blocks = [pair for pair in pairs if pair[1].is_contiguous()]
    left = sum(dest.nbytes for _, dest in blocks)
    lenders: set[int] = set()
    staged: list[Pair] = []
    unpacked: list[Pair] = []
    without_room: list[int] = []
    candidates = sorted(range(len(blocks)), key=lambda i: blocks[i][1].nbytes)  # largest last
    room = torch.empty(0, dtype=torch.uint8)
    num_staged = 0
    for index, (source, dest) in enumerate(pairs):
        if dest.is_contiguous():
            continue
        size = -(-dest.nbytes // ALIGNMENT) * ALIGNMENT
        if not _fits(dest, room) and candidates:
            lender = blocks[candidates[-1]][1]
            found = lender.flatten().view(torch.uint8)
            if _fits(dest, found) and left - lender.nbytes >= num_staged + size:
                lenders.add(candidates.pop())
                left, room = left - lender.nbytes, found
        if not _fits(dest, room) or left < num_staged + size:
            without_room.append(index)
            continue
        landing = room[: dest.nbytes].view(dest.dtype).view(dest.shape)
        room, num_staged = room[size:], num_staged + size
        staged.append((source, landing))
        unpacked.append((landing, dest))
    return Lent(
        staged,
        unpacked,
        plain=[pair for i, pair in enumerate(blocks) if i not in lenders],
        lenders=[blocks[i] for i in sorted(lenders)],
        without_room=without_room,
    )


def _fits(dest: torch.Tensor, room: torch.Tensor) -> bool:
    """Whether bytes can hold a destination's elements, each at a multiple of its size."""
    return room.numel() >= dest.nbytes and room.storage_offset() % dest.element_size() == 0
