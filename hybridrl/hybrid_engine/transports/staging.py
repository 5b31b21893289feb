"""Staging memory for the copy engines, taken from destinations that are written last.

A copy engine copies blocks that are contiguous at both ends. A slice of a row-parallel weight is
contiguous at its source and strided at its destination. It is staged: a copy engine brings it into
contiguous memory of this rank, and a kernel that reads this rank's memory only copies it from there
to its destination. Nothing is allocated for that: destinations whose own content comes last serve
as staging memory until then. The order of the copies is:

    1. to_staging: the strided slices go into staging memory
    2. direct: all other blocks; while they travel, from_staging: the kernel copies what is staged
    3. last: the blocks whose destinations were staging memory
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybridrl.hybrid_engine.transports.transport import Pair

ALIGNMENT = 16  # bytes; of the widest loads


class StagedCopies(NamedTuple):
    """Pairs of (source, destination), by when they are copied.

    Args:
        to_staging: source, staging memory.
        from_staging: staging memory, destination; after all of `to_staging`.
        direct: at any time.
        last: after all of `from_staging`.
        unstaged: indices of the given pairs for which there was no staging memory. They are to be
            copied in another way.
    """

    to_staging: list[Pair]
    from_staging: list[Pair]
    direct: list[Pair]
    last: list[Pair]
    unstaged: list[int]


def stage_copies(pairs: Sequence[Pair]) -> StagedCopies:
    """Finds staging memory for the pairs whose destination is not contiguous.

    The staged bytes are at most the direct ones, so that the kernel ends before the copy engines.

    Args:
        pairs: sources are contiguous and of their destinations' dtypes, destinations do not
            overlap. They are in the order of their transfer, which each list of the result keeps.
    """
    blocks = [pair for pair in pairs if pair[1].is_contiguous()]
    direct_bytes = sum(dest.nbytes for _, dest in blocks)
    last: set[int] = set()
    to_staging: list[Pair] = []
    from_staging: list[Pair] = []
    unstaged: list[int] = []
    candidates = sorted(range(len(blocks)), key=lambda i: blocks[i][1].nbytes)  # largest last
    free = torch.empty(0, dtype=torch.uint8)  # of the staging memory
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
    """Whether bytes can hold a destination's elements, each at a multiple of its size."""
    return free.numel() >= dest.nbytes and free.storage_offset() % dest.element_size() == 0
