"""Draws tokens from the softmax of logits in one launch, with a separate random number for each
row.

PyTorch needs about 60 launches and 8 passes over fp32 copies of the logits. This kernel makes two
passes over the logits in the model's type: one to find the largest logit, one to sum exponentials.
Then only the block of columns that contains the draw is accumulated again. A row's result does not
depend on other rows.

Ideal memory traffic for B rows and V columns of 2 bytes: 4 B V bytes. The second pass reads from
the GPU's cache if rows fit into it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Number of columns in a block, and maximum number of blocks in a row. Vocabularies may have up to a
# million tokens.
WIDTH = 4096
MOST_BLOCKS = 256


def fits(vocab: int) -> bool:
    """Whether the kernel supports this vocabulary size."""
    return vocab <= WIDTH * MOST_BLOCKS


def draw_rows(
    logits_BV: torch.Tensor,
    temperature_B: torch.Tensor,
    is_greedy_B: torch.Tensor,
    seed_B: torch.Tensor,
    count_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws one token per row; see `reference.draw_rows` for arguments and result."""
    num_rows, vocab = logits_BV.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
    logps = torch.empty(num_rows, dtype=torch.float32, device=logits_BV.device)
    if not num_rows:
        return tokens, logps
    if logits_BV.stride(1) != 1:
        logits_BV = logits_BV.contiguous()
    blocks = triton.cdiv(vocab, WIDTH)
    _draw_row[(num_rows,)](
        logits_BV,
        temperature_B.contiguous(),
        is_greedy_B.contiguous(),
        seed_B.contiguous(),
        count_B.contiguous(),
        tokens,
        logps,
        vocab,
        logits_BV.stride(0),
        blocks,
        WIDTH=WIDTH,
        BLOCKS=triton.next_power_of_2(blocks),
        UNIT=2.0**-48,
        num_warps=8,
    )
    return tokens, logps


@triton.jit
def _mixed(bits: tl.tensor) -> tl.tensor:
    """The finalizer of SplitMix64."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def _bits(seed: tl.tensor, count: tl.tensor) -> tl.tensor:
    """64 random bits; see `reference.row_uniforms`."""
    start = _mixed(seed.to(tl.uint64, bitcast=True))
    return _mixed(start + (count.to(tl.uint64, bitcast=True) + 1) * 0x9E3779B97F4A7C15)


@triton.jit
def _scaled(
    logits_ptr: tl.tensor, column: tl.tensor, vocab: tl.tensor, temperature: tl.tensor
) -> tl.tensor:
    """Logits divided by the temperature; -inf for columns beyond the vocabulary."""
    loaded = tl.load(logits_ptr + column, mask=column < vocab, other=-float("inf"))
    return loaded.to(tl.float32) / temperature


@triton.jit
def _draw_row(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    is_greedy_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    count_ptr: tl.tensor,
    token_ptr: tl.tensor,
    logp_ptr: tl.tensor,
    vocab: tl.tensor,
    stride: tl.tensor,
    blocks: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    UNIT: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    lane = tl.arange(0, WIDTH)
    which = tl.arange(0, BLOCKS)
    logits_ptr += row * stride

    largest = -float("inf")
    greedy = 0
    for block in range(0, blocks):
        column = block * WIDTH + lane
        scaled = _scaled(logits_ptr, column, vocab, temperature)
        top = tl.max(scaled, 0)
        greedy = tl.where(top > largest, block * WIDTH + tl.argmax(scaled, 0), greedy)
        largest = tl.maximum(largest, top)

    # A NaN logit makes the sum and the log-probability NaN, which the caller rejects.
    sums = tl.zeros((BLOCKS,), dtype=tl.float64)
    for block in range(0, blocks):
        column = block * WIDTH + lane
        weight = tl.exp(_scaled(logits_ptr, column, vocab, temperature) - largest)
        sums = tl.where(which == block, tl.sum(weight.to(tl.float64), 0), sums)
    ends = tl.cumsum(sums, 0)
    total = tl.max(ends, 0)

    bits = _bits(tl.load(seed_ptr + row), tl.load(count_ptr + row)) >> 16
    drawn = bits.to(tl.float64) * UNIT * total
    # The sums and the draw may be rounded differently, so blocks with probability 0 are excluded.
    reached = tl.min(tl.where((ends > drawn) & (sums > 0), which, BLOCKS), 0)
    last = tl.max(tl.where(sums > 0, which, 0), 0)
    chosen = tl.minimum(reached, last)
    before = tl.sum(tl.where(which == chosen, ends - sums, 0.0), 0)

    column = chosen * WIDTH + lane
    scaled = _scaled(logits_ptr, column, vocab, temperature)
    weight = tl.exp(scaled - largest).to(tl.float64)
    is_beyond = (tl.cumsum(weight, 0) > drawn - before) & (weight > 0)
    first = tl.min(tl.where(is_beyond, lane, WIDTH), 0)
    last = tl.max(tl.where(weight > 0, lane, 0), 0)
    token = chosen * WIDTH + tl.minimum(first, last)

    token = tl.where(tl.load(is_greedy_ptr + row), greedy, token)
    scaled = _scaled(logits_ptr, token, vocab, temperature)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logp_ptr + row, scaled - largest - tl.log(total).to(tl.float32))
