"""Adds the products of a LoRA adapter's B matrices to the output of a linear layer, in place.

One kernel serves all projections of a fused layer.

Ideal for M tokens, N outputs and rank r: 2 M r N FLOPs; the output is read and written once. While
few tokens are decoded, the launch dominates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

MOST_PROJECTIONS = 3
LEAST_RANK = 16  # least size of a tensor core's product; smaller ranks are padded in registers
LARGEST_RANK_BLOCK = 64
TOKENS_OF_LARGE_BATCH = 256


def add_up(
    y_MN: torch.Tensor,
    down_MR: torch.Tensor,
    bs: Sequence[torch.Tensor],
    slot_M: torch.Tensor,
    slot: int,
) -> None:
    """Adds B (A x) to the rows of y whose tokens use the adapter; see `reference.add_up`."""
    num_tokens, rank = y_MN.size(0), bs[0].size(1)
    block_m = 64 if num_tokens < TOKENS_OF_LARGE_BATCH else 128
    block_n = 128
    tiles = [triton.cdiv(b.size(0), block_n) for b in bs]
    padded = [*bs, *[bs[-1]] * (MOST_PROJECTIONS - len(bs))]
    ends = [sum(tiles[: index + 1]) for index in range(MOST_PROJECTIONS)]
    block_r = min(LARGEST_RANK_BLOCK, max(LEAST_RANK, triton.next_power_of_2(rank)))
    _add_up[(sum(tiles), triton.cdiv(num_tokens, block_m))](
        y_MN,
        down_MR,
        *padded,
        slot_M,
        slot,
        num_tokens,
        *[b.size(0) for b in padded],
        *ends[:2],
        y_MN.stride(0),
        down_MR.stride(0),
        RANK=rank,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_R=block_r,
        num_warps=4,
    )


@triton.jit
def _add_up(  # type: ignore[no-untyped-def]  # Triton's types are not Python's
    y_ptr,
    down_ptr,
    b0_ptr,
    b1_ptr,
    b2_ptr,
    slot_ptr,
    slot,
    num_tokens,
    size0,
    size1,
    size2,
    end0,
    end1,
    stride_y,
    stride_down,
    RANK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Each program adds to one tile of one projection's outputs."""
    tile = tl.program_id(0)
    b_ptr, size, first, place = b0_ptr, size0, 0, tile
    if tile >= end0:
        b_ptr, size, first, place = b1_ptr, size1, size0, tile - end0
    if tile >= end1:
        b_ptr, size, first, place = b2_ptr, size2, size0 + size1, tile - end1
    number = (tile >= end0).to(tl.int32) + (tile >= end1).to(tl.int32)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = place * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_tokens, columns < size
    uses = tl.load(slot_ptr + rows, mask=is_row, other=-1) == slot
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.static_range(0, RANK, BLOCK_R):
        ranks = start + tl.arange(0, BLOCK_R)
        is_rank = ranks < RANK
        down = tl.load(
            down_ptr + rows[:, None].to(tl.int64) * stride_down + number * RANK + ranks[None, :],
            mask=uses[:, None] & is_rank[None, :],
            other=0.0,
        )
        b = tl.load(
            b_ptr + columns[None, :] * RANK + ranks[:, None],
            mask=is_column[None, :] & is_rank[:, None],
            other=0.0,
        )
        sums = tl.dot(down, b, sums, input_precision="ieee")
    places = y_ptr + rows[:, None].to(tl.int64) * stride_y + first + columns[None, :]
    mask = uses[:, None] & is_column[None, :]
    old = tl.load(places, mask=mask, other=0.0)
    tl.store(places, (old.to(tl.float32) + sums).to(old.dtype), mask=mask)
