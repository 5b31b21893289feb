"""Norms, SwiGLU and rotary positions, whose result for a row has the same bits in every batch.

One program computes a row with blocks that only the row's size determines, so engine and trainer
compute the same bits if both call these functions. Values are rounded as in plain PyTorch: the
normalized input before the weight, silu before the product, and each product of a rotation.

Ideal memory traffic: inputs and outputs once. While few tokens are decoded, the launch dominates.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_PROGRAMS = 2048  # partial sums of a weight's gradient
COLUMNS_PER_WARP = 512
SWIGLU_BLOCK = 1024


def rms_norm(
    x: torch.Tensor,
    weight_D: torch.Tensor,
    eps: float,
    is_centered: bool,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Normalizes rows of x, or of x + residual, rounded to their type.

    Args:
        x: (..., D). The last dim is contiguous, and the other dims have one stride.
        residual: As `x`; None for zeros.

    Returns:
        The normalized rows, the inverse of the root mean square, (..., 1) fp32, and the sum; the
        sum is x itself without a residual. Formulas as in `invariant.rms_norm`.
    """
    size = x.size(-1)
    rows = x.reshape(-1, size)
    inverse = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    found = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    added, total = rows, rows
    if residual is not None:
        added = residual.reshape(-1, size)
        total = torch.empty_like(found)
    if len(rows):
        block = triton.next_power_of_2(size)
        _normalize[(len(rows),)](
            rows,
            added,
            weight_D,
            found,
            total,
            inverse,
            rows.stride(0),
            added.stride(0),
            size,
            eps,
            HAS_RESIDUAL=residual is not None,
            IS_CENTERED=is_centered,
            BLOCK=block,
            num_warps=_warps(block),
        )
    total = x if residual is None else total.view(x.shape)
    return found.view(x.shape), inverse.view(*x.shape[:-1], 1), total


def rms_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight_D: torch.Tensor,
    inverse: torch.Tensor,
    is_centered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients of the rows and of the weight, in their types; summed in fp32.

    Args:
        inverse: Second result of `rms_norm`.
    """
    size = x.size(-1)
    rows, grads = x.reshape(-1, size), grad.reshape(-1, size)
    grad_x = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    num_programs = min(len(rows), MOST_PROGRAMS)
    parts = torch.empty(num_programs, size, dtype=torch.float32, device=x.device)
    if len(rows):
        block = triton.next_power_of_2(size)
        _normalize_backward[(num_programs,)](
            grads,
            rows,
            weight_D,
            inverse.reshape(-1),
            grad_x,
            parts,
            grads.stride(0),
            rows.stride(0),
            len(rows),
            size,
            num_programs,
            IS_CENTERED=is_centered,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return grad_x.view(x.shape), parts.sum(0).to(weight_D.dtype)


def swiglu(x_MF2: torch.Tensor) -> torch.Tensor:
    """Returns silu(gate) * up, (..., F), of rows that contain the gate and then the up."""
    size = x_MF2.size(-1) // 2
    rows = x_MF2.reshape(-1, 2 * size)
    found = torch.empty(len(rows), size, dtype=x_MF2.dtype, device=x_MF2.device)
    if len(rows):
        blocks = triton.cdiv(size, SWIGLU_BLOCK)
        _swiglu[(len(rows), blocks)](rows, found, rows.stride(0), size, BLOCK=SWIGLU_BLOCK)
    return found.view(*x_MF2.shape[:-1], size)


def swiglu_backward(grad: torch.Tensor, x_MF2: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of `swiglu`'s input."""
    size = x_MF2.size(-1) // 2
    rows, grads = x_MF2.reshape(-1, 2 * size), grad.reshape(-1, size)
    found = torch.empty(rows.shape, dtype=x_MF2.dtype, device=x_MF2.device)
    if len(rows):
        _swiglu_backward[(len(rows), triton.cdiv(size, SWIGLU_BLOCK))](
            grads, rows, found, grads.stride(0), rows.stride(0), size, BLOCK=SWIGLU_BLOCK
        )
    return found.view(x_MF2.shape)


def rotate(
    x_THD: torch.Tensor,
    table_LD: torch.Tensor,
    row_T: torch.Tensor,
    out_THD: torch.Tensor | None = None,
    is_inverse: bool = False,
) -> torch.Tensor:
    """Rotates the first dims of each head by the angles of a token's position.

    Args:
        x_THD: The last dim is contiguous.
        table_LD: For each position, the cosines of half the rotated dims, then their sines, in the
            type of x.
        row_T: Row of the table for each token.
        out_THD: Where to write; may be x itself. None for a new tensor.
        is_inverse: Whether to rotate backwards.
    """
    num_tokens, num_heads, size = x_THD.shape
    half = table_LD.size(1) // 2
    if out_THD is None:
        out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
        if 2 * half < size:
            out_THD[..., 2 * half :] = x_THD[..., 2 * half :]
    if num_tokens:
        _rotate[(num_tokens,)](
            x_THD,
            out_THD,
            table_LD,
            row_T,
            x_THD.stride(0),
            x_THD.stride(1),
            out_THD.stride(0),
            out_THD.stride(1),
            table_LD.stride(0),
            num_heads,
            half,
            IS_INVERSE=is_inverse,
            HEADS=triton.next_power_of_2(num_heads),
            HALF=triton.next_power_of_2(half),
        )
    return out_THD


def _warps(block: int) -> int:
    return min(max(block // COLUMNS_PER_WARP, 1), 16)


@triton.jit
def _normalize(  # type: ignore[no-untyped-def]  # Triton's types are not Python's
    x,
    residual,
    weight,
    found,
    total,
    inverse,
    x_stride,
    residual_stride,
    size,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    is_here = place < size
    kind = found.dtype.element_ty
    value = tl.load(x + row * x_stride + place, mask=is_here, other=0.0)
    if HAS_RESIDUAL:
        other = tl.load(residual + row * residual_stride + place, mask=is_here, other=0.0)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(kind)
        tl.store(total + row * size + place, value, mask=is_here)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    tl.store(inverse + row, scale)
    factor = tl.load(weight + place, mask=is_here, other=0.0).to(tl.float32)
    if IS_CENTERED:
        result = wide * scale * (1.0 + factor)
    else:
        result = (wide * scale).to(kind).to(tl.float32) * factor
    tl.store(found + row * size + place, result.to(kind), mask=is_here)


@triton.jit
def _normalize_backward(  # type: ignore[no-untyped-def]
    grad,
    x,
    weight,
    inverse,
    grad_x,
    parts,
    grad_stride,
    x_stride,
    num_rows,
    size,
    num_programs,
    IS_CENTERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    is_here = place < size
    factor = tl.load(weight + place, mask=is_here, other=0.0).to(tl.float32)
    if IS_CENTERED:
        factor = factor + 1.0
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program, num_rows, num_programs):
        start = tl.zeros((1,), dtype=tl.int64) + row  # products of it need 64 bits
        wide = tl.load(x + start * x_stride + place, mask=is_here, other=0.0).to(tl.float32)
        slope = tl.load(grad + start * grad_stride + place, mask=is_here, other=0.0)
        slope = slope.to(tl.float32)
        scale = tl.load(inverse + row)
        unit = wide * scale
        total += slope * unit
        scaled = slope * factor
        mean = tl.sum(scaled * unit, 0) / size
        result = scale * (scaled - unit * mean)
        tl.store(grad_x + start * size + place, result.to(grad_x.dtype.element_ty), mask=is_here)
    tl.store(parts + program * size + place, total, mask=is_here)


@triton.jit
def _swiglu(x, found, stride, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = place < size
    kind = found.dtype.element_ty
    gate = tl.load(x + row * stride + place, mask=is_here, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + size + place, mask=is_here, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(found + row * size + place, (silu * up).to(kind), mask=is_here)


@triton.jit
def _swiglu_backward(  # type: ignore[no-untyped-def]
    grad, x, found, grad_stride, stride, size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_here = place < size
    kind = found.dtype.element_ty
    slope = tl.load(grad + row * grad_stride + place, mask=is_here, other=0.0).to(tl.float32)
    gate = tl.load(x + row * stride + place, mask=is_here, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + size + place, mask=is_here, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    grad_gate = slope * up * (sigmoid + silu * (1.0 - sigmoid))
    start = found + row * 2 * size + place
    tl.store(start, grad_gate.to(kind), mask=is_here)
    tl.store(start + size, (slope * silu).to(kind), mask=is_here)


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x,
    out,
    table,
    rows,
    token_stride,
    head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    num_heads,
    half,
    IS_INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + token).to(tl.int64)
    place = tl.arange(0, HALF)
    is_angle = place < half
    kind = out.dtype.element_ty
    cos = tl.load(table + row * table_stride + place, mask=is_angle, other=0.0).to(tl.float32)
    sin = tl.load(table + row * table_stride + half + place, mask=is_angle, other=0.0)
    sin = sin.to(tl.float32)
    if IS_INVERSE:
        sin = -sin
    head = tl.arange(0, HEADS)
    is_here = (head < num_heads)[:, None] & is_angle[None]
    start = x + token * token_stride + head[:, None] * head_stride + place[None]
    first = tl.load(start, mask=is_here, other=0.0).to(tl.float32)
    second = tl.load(start + half, mask=is_here, other=0.0).to(tl.float32)
    # Rounded products, as in plain PyTorch; this also keeps a compiler from fusing them with sums.
    own = (first * cos[None]).to(kind).to(tl.float32)
    crossed = (-second * sin[None]).to(kind).to(tl.float32)
    own_second = (second * cos[None]).to(kind).to(tl.float32)
    crossed_second = (first * sin[None]).to(kind).to(tl.float32)
    end = out + token * out_token_stride + head[:, None] * out_head_stride + place[None]
    tl.store(end, (own + crossed).to(kind), mask=is_here)
    tl.store(end + half, (own_second + crossed_second).to(kind), mask=is_here)
