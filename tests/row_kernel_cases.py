"""Cases of norms, SwiGLU and rotary positions, a script: on CPU under TRITON_INTERPRET=1, on a GPU
as it is. Results must be the reference's within the rounding of their type, and a row's result must
have the same bits alone as among others.
"""

from __future__ import annotations

import random

import torch
from hybridrl.kernels import invariant, rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of the largest element. The interpreter cuts bits off where GPUs round, in several steps.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 2e-2 if DEVICE.type == "cpu" else 8e-3}


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    error = float((found.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    assert error < BOUNDS[dtype], (found.shape, dtype, error)


def norm_case(num_rows: int, size: int, dtype: torch.dtype, is_centered: bool) -> None:
    """Compares a norm of a sum, its gradients, and a norm of a part of the rows."""
    wide = torch.randn(num_rows, size + 8, device=DEVICE).to(dtype)
    x, residual = wide[:, :size], torch.randn(num_rows, size, device=DEVICE).to(dtype)
    weight = torch.rand(size, device=DEVICE).to(dtype)
    found, inverse, total = rows.rms_norm(x, weight, 1e-5, is_centered, residual)
    wanted, wanted_inverse = invariant.rms_norm(x + residual, weight, 1e-5, is_centered)
    close(total, x + residual, dtype)
    close(found, wanted, dtype)
    close(inverse, wanted_inverse, dtype)
    grad = torch.randn(num_rows, size, device=DEVICE).to(dtype)
    arguments = grad, total, weight, inverse, is_centered
    for ours, theirs in zip(
        rows.rms_norm_backward(*arguments), invariant.rms_norm_backward(*arguments), strict=True
    ):
        close(ours, theirs, dtype)
    part, _, same = rows.rms_norm(total[:1], weight, 1e-5, is_centered)
    assert torch.equal(part, found[:1]) and torch.equal(same, total[:1])


def swiglu_case(num_rows: int, size: int, dtype: torch.dtype) -> None:
    x = torch.randn(num_rows, 2, 2 * size, device=DEVICE).to(dtype)
    grad = torch.randn(num_rows, 2, size, device=DEVICE).to(dtype)
    found = rows.swiglu(x)
    close(found, invariant.swiglu(x), dtype)
    close(rows.swiglu_backward(grad, x), invariant.swiglu_backward(grad, x), dtype)
    assert torch.equal(rows.swiglu(x[:1]), found[:1])


def rotary_case(num_tokens: int, num_heads: int, size: int, half: int, dtype: torch.dtype) -> None:
    """Compares heads that lie within wider rows; some rotate only in part."""
    wide = torch.randn(num_tokens, num_heads * size + 24, device=DEVICE).to(dtype)
    x = wide[:, : num_heads * size].view(num_tokens, num_heads, size)
    table = torch.randn(50, 2 * half, device=DEVICE).to(dtype)
    place = torch.randint(50, (num_tokens,), device=DEVICE)
    for is_inverse in (False, True):
        found = rows.rotate(x, table, place, is_inverse=is_inverse)
        close(found, invariant.rotate(x, table, place, is_inverse), dtype)
    rows.rotate(x, table, place, out_THD=x, is_inverse=True)
    assert torch.equal(x, found)


def main() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    num_cases = 8
    for number in range(num_cases):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        num_rows, size = rng.choice([1, 3, 37]), rng.choice([8, 72, 576])
        norm_case(num_rows, size, dtype, is_centered=number % 3 == 0)
        swiglu_case(num_rows, size, dtype)
        heads, half = rng.choice([1, 3, 14]), rng.choice([4, 6, 16])
        rotary_case(num_rows, heads, rng.choice([2 * half, 2 * half + 10]), half, dtype)
    print(f"{num_cases} cases of rows on {DEVICE}")


if __name__ == "__main__":
    main()
