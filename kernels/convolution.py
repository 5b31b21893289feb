"""Causal convolution of each channel with SiLU over packed sequences, forward and backward.

A token reads itself and the K - 1 tokens before it; before a sequence's first token are the rows of
`before`, or zeros. The backward pass computes the convolution again. It has two kernels, because
the gradient of a token needs those of the K - 1 tokens after it.

Ideal for T tokens and C channels in 16 bits: 4 T C bytes forward; 6 T C bytes backward, and another
6 T C here, in which the gradients before the activation are written and read.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

BLOCK_T, BLOCK_C = 32, 128
TOKENS_PER_SUM = 256  # tokens per partial sum of the weights' gradient


class Spans(NamedTuple):
    """Place of each packed token in its sequence, int32.

    Args:
        number_T: Index of the token's sequence.
        since_T: Number of tokens before it in the sequence.
        left_T: Number of tokens after it in the sequence.
    """

    number_T: torch.Tensor
    since_T: torch.Tensor
    left_T: torch.Tensor


def convolve(
    channels_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    spans: Spans,
    before_NPC: torch.Tensor | None,
) -> torch.Tensor:
    """Returns silu(convolution), (T, C) in the type of the channels; differentiable with respect to
    channels, weights and `before`.

    Args:
        weight_CK: Kernel of each channel; the last weight is for the current token.
        before_NPC: P = K - 1 tokens before each sequence; None for zeros.
    """
    found: torch.Tensor = _Convolution.apply(channels_TC, weight_CK, spans, before_NPC)
    return found


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        channels: torch.Tensor,
        weight: torch.Tensor,
        spans: Spans,
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        if channels.stride(1) != 1:
            channels = channels.contiguous()
        weight = weight.contiguous()
        before = None if before is None else before.contiguous()
        output = channels.new_empty(channels.shape)
        num_tokens, num_channels = channels.shape
        grid = triton.cdiv(num_tokens, BLOCK_T), triton.cdiv(num_channels, BLOCK_C)
        _forward[grid](
            channels,
            weight,
            channels if before is None else before,
            spans.number_T,
            spans.since_T,
            output,
            num_tokens,
            num_channels,
            channels.stride(0),
            **_constants(weight, before),
        )
        ctx.save_for_backward(channels, weight, before, *spans)
        return output

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        channels, weight, before, number_T, since_T, left_T = ctx.saved_tensors
        grad = grad.contiguous()
        num_tokens, num_channels = channels.shape
        # In the type of the channels, which is that of the gradients before and after it.
        inner = torch.empty_like(grad)
        of_before = None if before is None else before.new_empty(before.shape)
        num_sums = triton.cdiv(num_tokens, TOKENS_PER_SUM)
        sums = weight.new_empty(num_sums, *weight.shape, dtype=torch.float32)
        constants = _constants(weight, before)
        _inner[num_sums, triton.cdiv(num_channels, BLOCK_C)](
            channels,
            weight,
            channels if before is None else before,
            number_T,
            since_T,
            grad,
            inner,
            sums,
            num_tokens,
            num_channels,
            channels.stride(0),
            NUM_BLOCKS=TOKENS_PER_SUM // BLOCK_T,
            **constants,
        )
        of_channels = torch.empty_like(grad)
        _outer[triton.cdiv(num_tokens, BLOCK_T), triton.cdiv(num_channels, BLOCK_C)](
            weight,
            number_T,
            since_T,
            left_T,
            inner,
            of_channels,
            of_channels if of_before is None else of_before,
            num_tokens,
            num_channels,
            **constants,
        )
        return of_channels, sums.sum(0).to(weight.dtype), None, of_before


def _constants(weight: torch.Tensor, before: torch.Tensor | None) -> dict[str, Any]:
    return {
        "KERNEL": weight.size(1),
        "HAS_BEFORE": before is not None,
        "BLOCK_T": BLOCK_T,
        "BLOCK_C": BLOCK_C,
        "num_warps": 4,
    }


@triton.jit
def _tap(  # type: ignore[no-untyped-def]  # Triton's types are not Python's
    channels_ptr,
    before_ptr,
    t,
    c,
    number,
    since,
    is_real,
    num_channels,
    stride,
    offset,
    KERNEL: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
):
    """Returns the inputs `offset` tokens before the tokens t, (T, C) fp32."""
    is_inside = is_real & (since >= offset)[:, None]
    where = (t - offset).to(tl.int64)[:, None] * stride + c[None, :]
    found = tl.load(channels_ptr + where, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_BEFORE:
        row = number * (KERNEL - 1) + since - offset + KERNEL - 1
        where = row.to(tl.int64)[:, None] * num_channels + c[None, :]
        is_before = is_real & (since < offset)[:, None]
        found += tl.load(before_ptr + where, mask=is_before, other=0.0).to(tl.float32)
    return found


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    channels_ptr,
    weight_ptr,
    before_ptr,
    number_ptr,
    since_ptr,
    output_ptr,
    num_tokens,
    num_channels,
    stride,
    KERNEL: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_token, is_channel = t < num_tokens, c < num_channels
    is_real = is_token[:, None] & is_channel[None, :]
    number = tl.load(number_ptr + t, mask=is_token, other=0)
    since = tl.load(since_ptr + t, mask=is_token, other=0)
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for k in tl.static_range(KERNEL):
        weight = tl.load(weight_ptr + c * KERNEL + k, mask=is_channel, other=0.0).to(tl.float32)
        total += weight[None, :] * _tap(
            channels_ptr,
            before_ptr,
            t,
            c,
            number,
            since,
            is_real,
            num_channels,
            stride,
            KERNEL - 1 - k,
            KERNEL,
            HAS_BEFORE,
        )
    output = total / (1 + tl.exp(-total))
    where = t.to(tl.int64)[:, None] * num_channels + c[None, :]
    tl.store(output_ptr + where, output.to(output_ptr.dtype.element_ty), mask=is_real)


@triton.jit
def _inner(  # type: ignore[no-untyped-def]
    channels_ptr,
    weight_ptr,
    before_ptr,
    number_ptr,
    since_ptr,
    grad_ptr,
    inner_ptr,
    sums_ptr,
    num_tokens,
    num_channels,
    stride,
    NUM_BLOCKS: tl.constexpr,
    KERNEL: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Writes the gradients before the activation, and partial sums of those of the weights."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_channel, k = c < num_channels, tl.arange(0, KERNEL)
    sums = tl.zeros((BLOCK_C, KERNEL), tl.float32)
    for block in range(0, NUM_BLOCKS):
        t = (tl.program_id(0) * NUM_BLOCKS + block) * BLOCK_T + tl.arange(0, BLOCK_T)
        is_token = t < num_tokens
        is_real = is_token[:, None] & is_channel[None, :]
        number = tl.load(number_ptr + t, mask=is_token, other=0)
        since = tl.load(since_ptr + t, mask=is_token, other=0)
        total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
        for tap in tl.static_range(KERNEL):
            weight = tl.load(weight_ptr + c * KERNEL + tap, mask=is_channel, other=0.0)
            total += weight.to(tl.float32)[None, :] * _tap(
                channels_ptr,
                before_ptr,
                t,
                c,
                number,
                since,
                is_real,
                num_channels,
                stride,
                KERNEL - 1 - tap,
                KERNEL,
                HAS_BEFORE,
            )
        where = t.to(tl.int64)[:, None] * num_channels + c[None, :]
        grad = tl.load(grad_ptr + where, mask=is_real, other=0.0).to(tl.float32)
        gate = 1 / (1 + tl.exp(-total))
        inner = grad * gate * (1 + total * (1 - gate))
        tl.store(inner_ptr + where, inner.to(inner_ptr.dtype.element_ty), mask=is_real)
        for tap in tl.static_range(KERNEL):
            found = _tap(
                channels_ptr,
                before_ptr,
                t,
                c,
                number,
                since,
                is_real,
                num_channels,
                stride,
                KERNEL - 1 - tap,
                KERNEL,
                HAS_BEFORE,
            )
            sums += tl.where(k[None, :] == tap, tl.sum(found * inner, 0)[:, None], 0.0)
    where = (tl.program_id(0).to(tl.int64) * num_channels + c[:, None]) * KERNEL + k[None, :]
    tl.store(sums_ptr + where, sums, mask=is_channel[:, None])


@triton.jit
def _outer(  # type: ignore[no-untyped-def]
    weight_ptr,
    number_ptr,
    since_ptr,
    left_ptr,
    inner_ptr,
    of_channels_ptr,
    of_before_ptr,
    num_tokens,
    num_channels,
    KERNEL: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Writes the gradients of the channels, and of the tokens before each sequence, for which the
    sequence's first token is responsible.
    """
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_token, is_channel = t < num_tokens, c < num_channels
    is_real = is_token[:, None] & is_channel[None, :]
    left = tl.load(left_ptr + t, mask=is_token, other=0)
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for k in tl.static_range(KERNEL):
        offset = KERNEL - 1 - k
        weight = tl.load(weight_ptr + c * KERNEL + k, mask=is_channel, other=0.0).to(tl.float32)
        where = (t + offset).to(tl.int64)[:, None] * num_channels + c[None, :]
        is_inside = is_real & (left >= offset)[:, None]
        inner = tl.load(inner_ptr + where, mask=is_inside, other=0.0).to(tl.float32)
        total += weight[None, :] * inner
    where = t.to(tl.int64)[:, None] * num_channels + c[None, :]
    tl.store(of_channels_ptr + where, total.to(of_channels_ptr.dtype.element_ty), mask=is_real)
    if HAS_BEFORE:
        number = tl.load(number_ptr + t, mask=is_token, other=0)
        since = tl.load(since_ptr + t, mask=is_token, other=1)
        is_first = is_real & (since == 0)[:, None]
        for row in tl.static_range(KERNEL - 1):
            total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
            for k in tl.static_range(KERNEL):
                if k <= row:
                    # Tap k of the sequence's token at row - k reads this row.
                    weight = tl.load(weight_ptr + c * KERNEL + k, mask=is_channel, other=0.0)
                    where = (t + (row - k)).to(tl.int64)[:, None] * num_channels + c[None, :]
                    is_inside = is_first & (left >= row - k)[:, None]
                    inner = tl.load(inner_ptr + where, mask=is_inside, other=0.0)
                    total += weight.to(tl.float32)[None, :] * inner.to(tl.float32)
            where = (number * (KERNEL - 1) + row).to(tl.int64)[:, None] * num_channels + c[None, :]
            tl.store(of_before_ptr + where, total.to(of_before_ptr.dtype.element_ty), mask=is_first)
