"""Finds staging memory for copy engines in destinations that are written last.

A copy engine can only copy blocks that are contiguous in both source and destination. A slice of a
row-parallel weight is strided in its destination. Therefore a copy engine copies it to contiguous
staging memory on this rank, and a kernel copies it from there to its destination. Some destinations
serve as staging memory and receive their own content last. The order of the copies is:

    1. to_staging: slices with a strided destination are copied to staging memory
    2. direct: all other blocks are copied; meanwhile from_staging: the kernel copies the staged
    slices
    3. last: blocks are copied to the destinations that served as staging memory
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybridrl.hybrid_engine.transports.transport import Pair

ALIGNMENT = 16  # bytes of the widest load


class StagedCopies(NamedTuple):
    """Pairs of (source, destination) by the time at which they are copied; see the module.

    `unstaged` are the indices of pairs for which no staging memory was left. The caller must copy
    them in another way.
    """

    to_staging: list[Pair]
    from_staging: list[Pair]
    direct: list[Pair]
    last: list[Pair]
    unstaged: list[int]


def stage_copies(pairs: Sequence[Pair]) -> StagedCopies:
    """Finds staging memory for the pairs whose destination is not contiguous.

    No more bytes are staged than are copied directly, so that the kernel finishes before the copy
    engines. Pairs keep their order. Sources are contiguous and have the dtype of their
    destinations; destinations do not overlap.
    """
    blocks = [pair for pair in pairs if pair[1].is_contiguous()]
    direct_bytes = sum(dest.nbytes for _, dest in blocks)
    last: set[int] = set()
    to_staging: list[Pair] = []
    from_staging: list[Pair] = []
    unstaged: list[int] = []
    candidates = sorted(range(len(blocks)), key=lambda i: blocks[i][1].nbytes)  # largest last
    free = torch.empty(0, dtype=torch.uint8)  # unused part of the current staging memory
    staged_bytes = 0
    for index, (source, dest) in enumerate(pairs):
        if dest.is_contiguous():
            continue
        size = -(-dest.nbytes // ALIGNMENT) * ALIGNMENT
        if not _fits(dest, free) and candidates:
            block = blocks[candidates[-1]][1].flatten().view(torch.uint8)
            if _fits(dest, block) and direct_bytes - block.nbytes >= staged_bytes + size:
                last.add(candidates.pop())
                direct_bytes, free = direct_bytes - block.nbytes, block
        if not _fits(dest, free) or direct_bytes < staged_bytes + size:
            unstaged.append(index)
            continue
        staged = free[: dest.nbytes].view(dest.dtype).view(dest.shape)
        free, staged_bytes = free[size:], staged_bytes + size
        to_staging.append((source, staged))
        from_staging.append((staged, dest))
    return StagedCopies(
        to_staging,
        from_staging,
        direct=[pair for i, pair in enumerate(blocks) if i not in last],
        last=[blocks[i] for i in sorted(last)],
        unstaged=unstaged,
    )


def _fits(dest: torch.Tensor, free: torch.Tensor) -> bool:
    """Whether these bytes are enough for a destination's elements and are aligned for them."""
    return free.numel() >= dest.nbytes and free.storage_offset() % dest.element_size() == 0
