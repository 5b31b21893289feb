"""Staging memory for copy engines, taken from destinations that are written last.

A copy engine copies blocks that are contiguous at both ends. A slice of a row-parallel weight is
contiguous at its source and strided at its destination. A copy engine therefore brings it into
contiguous staging memory of this rank, and a kernel copies it from there to its destination. No
memory is allocated: destinations whose own content comes last serve as staging memory until then.
The order of the copies is:

    1. to_staging: strided slices go into staging memory
    2. direct: all other blocks; meanwhile from_staging: the kernel copies the staged slices
    3. last: the blocks whose destinations were staging memory
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hybridrl.hybrid_engine.transports.transport import Pair

ALIGNMENT = 16  # bytes of the widest load


class StagedCopies(NamedTuple):
    """Pairs of (source, destination), grouped by when they are copied.

    Args:
        to_staging: Pairs of source and staging memory.
        from_staging: Pairs of staging memory and destination; copied after all of `to_staging`.
        direct: Pairs that are copied at any time.
        last: Pairs that are copied after all of `from_staging`.
        unstaged: Indices of the given pairs for which there was no staging memory. The caller
            copies them in another way.
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
        pairs: Pairs in the order of their transfer, which each list of the result keeps. Sources
            are contiguous and have the dtype of their destinations; destinations do not overlap.
    """
    blocks = [pair for pair in pairs if pair[1].is_contiguous()]
    direct_bytes = sum(dest.nbytes for _, dest in blocks)
    last: set[int] = set()
    to_staging: list[Pair] = []
    from_staging: list[Pair] = []
    unstaged: list[int] = []
    candidates = sorted(range(len(blocks)), key=lambda i: blocks[i][1].nbytes)  # largest last
    free = torch.empty(0, dtype=torch.uint8)  # rest of the current staging memory
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
    """Whether bytes can hold a destination's elements, aligned to their size."""
    return free.numel() >= dest.nbytes and free.storage_offset() % dest.element_size() == 0
