"""Divides blocks between the kernel and the copy engines so that no rank is a bottleneck.

In the first phase a rank's kernel reads small and strided rectangles from all peers. In the second
phase its copy engines copy whole blocks from one peer after another (peer.py). A few ranks may hold
most blocks, for example those with the embedding, if the sources are the optimizer's shards; all
ranks then compete for their links. Blocks are therefore moved to the first phase, until the busiest
sender of the second phase is no busier than its busiest reader, or until a rank's first phase would
become longer than the busiest rank's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridrl.hybrid_engine.transports.transport import Pair

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
