"""Computes which positions of packed sequences each context-parallel rank holds.

Each sequence is split into 2 * cp chunks. As in Megatron, rank r holds chunks r and 2 * cp - 1 - r,
so that causal attention is equally expensive on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def chunks_of(length: int, cp_size: int, cp_rank: int) -> list[tuple[int, int]]:
    """Returns (start, end) of the parts of a sequence that a rank holds.

    Args:
        length: Length of the sequence, a multiple of 2 * cp_size if cp_size > 1.
    """
    if cp_size == 1:
        return [(0, length)]
    chunk = length // (2 * cp_size)
    numbers = (cp_rank, 2 * cp_size - 1 - cp_rank)
    return [(number * chunk, (number + 1) * chunk) for number in numbers]


def context_positions(cu_seqlens: Sequence[int], cp_size: int, cp_rank: int) -> torch.Tensor:
    """Returns the packed positions that a rank holds, int64, in the order in its memory."""
    return torch.cat(
        [
            torch.arange(start + first, start + last)
            for start, end in zip(cu_seqlens, cu_seqlens[1:], strict=False)
            for first, last in chunks_of(end - start, cp_size, cp_rank)
        ]
    )


def gathered_rows(cu_seqlens: Sequence[int], cp_size: int) -> torch.Tensor:
    """Returns the row of each packed position after a gather over the ranks, (total,) int64."""
    held = torch.cat([context_positions(cu_seqlens, cp_size, rank) for rank in range(cp_size)])
    rows = torch.empty_like(held)
    rows[held] = torch.arange(len(held))
    return rows
