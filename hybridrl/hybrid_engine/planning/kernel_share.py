"""Divides blocks between the kernel and the copy engines so that no rank is a bottleneck.

A rank first runs a kernel that reads cut-up rectangles from all peers, and then its copy engines,
which bring whole blocks of one peer after the other (peer.py). A few ranks may hold most blocks:
for example those with the embedding and the head, if the sources are the optimizer's shards. All
ranks then read from these few in the second phase and share their links, which are idle in the
first phase. Blocks therefore move from the second phase to the first until the busiest sender of
the second phase is no busier than its busiest reader, or until some rank's kernel phase would
become longer than that of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridrl.hybrid_engine.transports.transport import Pair

# Bytes move in steps of this fraction of the busiest rank's bytes in the kernel's phase.
PARTS = 64


def kernel_shares(cut_up: np.ndarray, blocks: np.ndarray) -> np.ndarray:
    """Returns the bytes of blocks that each rank's kernel reads from each peer.

    Equal arguments give equal results, so all ranks agree.

    Args:
        cut_up: Bytes that the kernel reads in any case, of shape (ranks, ranks): outer index the
            rank that holds them, inner index the rank that reads them.
        blocks: Bytes of the blocks that copy engines could bring, of the same shape.
    """
    kernel, left = cut_up.astype(np.int64), blocks.astype(np.int64)
    most = max(kernel.sum(axis=1).max(initial=0), kernel.sum(axis=0).max(initial=0))
    step = -(-most // PARTS)
    while left.sum(axis=1).max(initial=0) > left.sum(axis=0).max(initial=0):
        sent, read = kernel.sum(axis=1), kernel.sum(axis=0)
        room = np.minimum(most - sent[:, None], most - read[None, :])
        can_move = np.minimum(np.minimum(room, left), step)
        # Move blocks of the busiest sender, for the reader that has most to read from it.
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
    """Returns the blocks for the kernel and those for the copy engines.

    The kernel first takes blocks whose destination is not contiguous, since copy engines need a
    second copy for them. Its last block may be cut between rows.

    Args:
        blocks: (source, destination) views of one peer's blocks; sources are contiguous.
        num_bytes: Most bytes that the kernel reads.
        least_bytes: Smallest rest of a block that is cut.
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
    """Returns how many rows fit into `num_bytes`; a cut block keeps at least `least_bytes`."""
    if block_bytes <= num_bytes:
        return num_rows
    row_bytes = block_bytes // num_rows
    return max(0, min(num_bytes, block_bytes - least_bytes) // row_bytes)
