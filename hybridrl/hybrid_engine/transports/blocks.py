"""Divides a peer transport's blocks between the kernel and the copy engines, and stages them.

In the first phase a rank's kernel reads small and strided rectangles from all peers. In the second
phase its copy engines copy whole blocks from one peer after another (peer.py). A few ranks may hold
most blocks, for example those with the embedding, if the sources are the optimizer's shards; all
ranks then compete for their links. `kernel_shares` therefore moves blocks to the first phase, until
the busiest sender of the second phase is no busier than its busiest reader, or until a rank's first
phase would become longer than the busiest rank's.

A copy engine can only copy blocks that are contiguous in both source and destination. A slice of a
row-parallel weight is strided in its destination. Therefore a copy engine copies it to contiguous
staging memory on this rank, and a kernel copies it from there to its destination. Some destinations
serve as staging memory and receive their own content last (`stage_copies`). The order of the copies
is:

    1. to_staging: slices with a strided destination are copied to staging memory
    2. direct: all other blocks are copied; meanwhile from_staging: the kernel copies the staged
    slices
    3. last: blocks are copied to the destinations that served as staging memory
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hybridrl.hybrid_engine.transports.transport import Pair

ALIGNMENT = 16  # bytes of the widest load
# A step moves at most the busiest rank's bytes in the first phase divided by this number.
PARTS = 64


def kernel_shares(cut_up: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Returns how many bytes of blocks each rank's kernel should read from each peer.

    Args:
        cut_up: Bytes that only the kernel can read, of shape (ranks, ranks). The outer index is the
            rank that holds them, the inner index the rank that reads them.
        blocks: Bytes of the blocks that copy engines could copy, of the same shape.
    """
    kernel, left = cut_up.astype(np.int64), blocks.astype(np.int64)
    most = max(kernel.sum(axis=1).max(initial=0), kernel.sum(axis=0).max(initial=0))
    step = -(-most // PARTS)
    while left.sum(axis=1).max(initial=0) > left.sum(axis=0).max(initial=0):
        sent, read = kernel.sum(axis=1), kernel.sum(axis=0)
        room = np.minimum(most - sent[:, None], most - read[None, :])
        can_move = np.minimum(np.minimum(room, left), step)
        # Move blocks of the busiest sender, for the reader with the most bytes left to read.
        source = int(left.sum(axis=1).argmax())
        reader = int(np.where(can_move[source] > 0, left[source], -1).argmax())
        moved = can_move[source, reader]
        if moved <= 0:
            break
        kernel[source, reader] += moved
        left[source, reader] -= moved
    return np.asarray(blocks - left)


def split_blocks(
    blocks: Sequence[Pair], num_bytes: int, least_bytes: int
) -> tuple[list[Pair], list[Pair]]:
    """Divides blocks; returns the blocks for the kernel and the blocks for the copy engines.

    Blocks with a strided destination are assigned to the kernel first, because copy engines need a
    second copy for them. The last block may be split between two rows.

    Args:
        num_bytes: Maximum number of bytes that the kernel reads.
        least_bytes: Minimum number of bytes that a split block leaves to the copy engines.
    """
    if num_bytes == 0:
        return [], list(blocks)
    taken: list[Pair] = []
    left: list[Pair] = []
    for source, dest in sorted(blocks, key=lambda pair: pair[1].is_contiguous()):
        rows = _rows_within(dest.nbytes, len(dest) if dest.dim() else 1, num_bytes, least_bytes)
        if rows == 0:
            left.append((source, dest))
            continue
        whole = dest.dim() == 0 or rows == len(dest)
        part = (source, dest) if whole else (source[:rows], dest[:rows])
        taken.append(part)
        num_bytes -= part[1].nbytes
        if not whole:
            left.append((source[rows:], dest[rows:]))
    return taken, left


def _rows_within(block_bytes: int, num_rows: int, num_bytes: int, least_bytes: int) -> int:
    """Returns the rows that fit into `num_bytes`, such that a split leaves `least_bytes`."""
    if block_bytes <= num_bytes:
        return num_rows
    row_bytes = block_bytes // num_rows
    return max(0, min(num_bytes, block_bytes - least_bytes) // row_bytes)


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
