"""What the kernel reads of the blocks that copy engines could bring, so that no rank is waited for.

A rank first runs a kernel that reads cut-up rectangles out of all peers, then its copy engines,
which bring whole blocks of one peer after the other (peer.py). Where the blocks of a few ranks are
many, as those of the ranks that hold the embedding and the head are when the optimizer's shards are
the sources, all ranks read from these few at once in the second phase, which each gives a share of
its link, and their links are idle in the first. What makes the second phase longer than its busiest
reader needs moves into the first, as long as no rank sends or reads more there than the busiest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridrl.hybrid_engine.transports.transport import Pair

# Parts in which bytes are moved, of what the busiest rank has in the kernel's phase.
PARTS = 64


def kernel_shares(cut_up: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Returns how many bytes of blocks the kernel of each rank reads out of each peer.

    The same on all ranks for the same arguments.

    Args:
        cut_up: bytes of shape (ranks, ranks), by the rank that holds them and the rank that reads
            them, which the kernel reads in any case.
        blocks: the same of what copy engines bring.
    """
    kernel, left = cut_up.astype(np.int64), blocks.astype(np.int64)
    most = max(kernel.sum(axis=1).max(initial=0), kernel.sum(axis=0).max(initial=0))
    step = -(-most // PARTS)
    while left.sum(axis=1).max(initial=0) > left.sum(axis=0).max(initial=0):
        sent, read = kernel.sum(axis=1), kernel.sum(axis=0)
        room = np.minimum(most - sent[:, None], most - read[None, :])
        can_move = np.minimum(np.minimum(room, left), step)
        # Of the rank that all wait for, from the reader that has most to read from it.
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
    """Returns the blocks that the kernel reads, and those that are left for the copy engines.

    Args:
        blocks: (source, destination) views of one peer's; sources are contiguous.
        num_bytes: that the kernel reads at most. First of blocks whose destination is not
            contiguous, which copy engines need a second copy for; the last one is cut between rows.
        least_bytes: of what is left of a block that is cut.
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
    """Returns how many rows of a block are at most so many bytes, and leave enough of it."""
    if block_bytes <= num_bytes:
        return num_rows
    row_bytes = block_bytes // num_rows
    return max(0, min(num_bytes, block_bytes - least_bytes) // row_bytes)
