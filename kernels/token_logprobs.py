"""Computes softmax statistics of a vocabulary shard and their gradients, one chunk of columns at a
time.

cuBLAS computes the matrix products at tensor-core speed; the kernels compute everything between
them. All chunks use the same fp32 scratch buffer for their logits, so that no logit is rounded to
the weight's type. Chunks contain columns, not tokens. A row of the weight's gradient is therefore
complete after one chunk, and is written only once, to the buffer in which Megatron accumulates
gradients.

Ideal for T tokens, V columns and hidden size D: 2 T V D FLOPs in the forward pass, and 6 T V D
FLOPs in the backward pass, which recomputes the logits. In addition, each logit causes 8 bytes of
memory traffic in the forward pass (written and read as fp32) and 14 bytes in the backward pass
(because its gradient is written once and read twice, in the weight's type).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from hybridrl.kernels import reference
from hybridrl.kernels.reference import VocabStats

# A chunk is an eighth of the shard, unless the backward pass's scratch buffers would leave these
# limits: large enough to keep a GPU busy, small enough for a GPU whose memory is nearly full.
LEAST_BYTES = 64 << 20
MOST_BYTES = 1 << 30
BYTES_PER_LOGIT = 6  # an fp32 logit and a 2-byte gradient
# Each program keeps a row of the chunk in registers, at most 32 fp32 values per thread.
LEAST_WIDTH = 1024
MOST_WIDTH = 16384
COLUMNS_PER_WARP = 1024


def vocab_stats(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    temperature: float,
    cap: float = 0.0,
) -> VocabStats:
    """Computes the softmax statistics of one vocabulary shard; see `reference.vocab_stats`."""
    if 0 in (hidden_TD.size(0), weight_VD.size(0)):
        return reference.vocab_stats(hidden_TD, weight_VD, target_T, temperature, cap)
    num_tokens, width = hidden_TD.size(0), _width(hidden_TD.size(0), weight_VD.size(0))
    logits = hidden_TD.new_empty(num_tokens, width, dtype=torch.float32)
    stats = torch.zeros(4, num_tokens, dtype=torch.float32, device=hidden_TD.device)
    for first, weight in _chunks(weight_VD, width):
        columns = weight.size(0)
        _multiply(hidden_TD, weight.T, logits[:, :columns])
        _add_columns[(num_tokens,)](
            logits,
            target_T,
            stats,
            num_tokens,
            first,
            columns,
            1 / temperature,
            cap,
            HAS_CAP=cap > 0,
            WIDTH=width,
            num_warps=_warps(width),
        )
    return VocabStats(*stats)


def vocab_backward(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    temperature: float,
    max_T: torch.Tensor,
    log_sum_T: torch.Tensor,
    entropy_T: torch.Tensor,
    grad_logp_T: torch.Tensor,
    grad_entropy_T: torch.Tensor | None,
    grad_weight_VD: torch.Tensor | None,
    cap: float = 0.0,
    is_trained: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes this shard's contribution to the gradients; see `reference.vocab_backward`.

    Gradients of logits are rounded to the weight's type; their sums are accumulated in fp32.
    """
    grad_logp_T = grad_logp_T.contiguous()  # autograd may expand one number to all tokens
    grad_entropy_T = None if grad_entropy_T is None else grad_entropy_T.contiguous()
    is_added, is_empty = grad_weight_VD is not None, 0 in (hidden_TD.size(0), weight_VD.size(0))
    fresh = torch.zeros_like if is_empty else torch.empty_like
    grad_weight = grad_weight_VD
    if is_trained and grad_weight is None:
        grad_weight = fresh(weight_VD)
    if is_empty:
        return torch.zeros_like(hidden_TD), grad_weight
    num_tokens, width = hidden_TD.size(0), _width(hidden_TD.size(0), weight_VD.size(0))
    logits = hidden_TD.new_empty(num_tokens, width, dtype=torch.float32)
    grads = hidden_TD.new_empty(num_tokens, width)
    grad_hidden = torch.empty_like(hidden_TD, dtype=torch.float32)
    for first, weight in _chunks(weight_VD, width):
        columns = weight.size(0)
        _multiply(hidden_TD, weight.T, logits[:, :columns])
        _logit_gradients[(num_tokens,)](
            logits,
            grads,
            target_T,
            max_T,
            log_sum_T,
            entropy_T,
            grad_logp_T,
            entropy_T if grad_entropy_T is None else grad_entropy_T,
            first,
            columns,
            1 / temperature,
            cap,
            HAS_CAP=cap > 0,
            HAS_ENTROPY=grad_entropy_T is not None,
            WIDTH=width,
            num_warps=_warps(width),
        )
        _multiply(grads[:, :columns], weight, grad_hidden, is_added=first > 0)
        if grad_weight is not None:
            rows = grad_weight[first : first + columns]
            _multiply(grads[:, :columns].T, hidden_TD, rows, is_added=is_added)
    return grad_hidden.to(hidden_TD.dtype), grad_weight


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    # Uses an exponential that cannot overflow, and a series near 0, where the exponential loses
    # precision.
    square = x * x
    near = x * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    power = tl.exp(-2 * tl.abs(x))
    far = (1 - power) / (1 + power)
    return tl.where(square < 0.0225, near, tl.where(x < 0, -far, far))


@triton.jit
def _add_columns(  # type: ignore[no-untyped-def]  # Triton's types are not Python's
    logits,
    targets,
    stats,
    num_tokens,
    first,
    columns,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # `stats` has the four rows of VocabStats and initially contains zeros. One program handles one
    # token.
    row = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    is_column = place < columns
    logits += row.to(tl.int64) * WIDTH
    logit = tl.load(logits + place, mask=is_column, other=0.0)
    if HAS_CAP:
        logit = cap * _tanh(logit / cap)
    logit = tl.where(is_column, logit * scale, float("-inf"))
    stats += row
    total = tl.load(stats + num_tokens)
    weighted = tl.load(stats + 2 * num_tokens)
    # A sum of 0 means that no column was processed yet, so there is no largest logit.
    largest = tl.where(total > 0, tl.load(stats), float("-inf"))
    new = tl.maximum(largest, tl.max(logit, 0))
    shift = tl.where(total > 0, largest - new, 0.0)
    shifted = tl.where(is_column, logit - new, 0.0)
    exp = tl.where(is_column, tl.exp(shifted), 0.0)
    old = tl.exp(shift)
    tl.store(stats, new)
    tl.store(stats + num_tokens, total * old + tl.sum(exp, 0))
    weighted = (weighted + total * shift) * old + tl.sum(exp * shifted, 0)
    tl.store(stats + 2 * num_tokens, weighted)
    column = tl.load(targets + row) - first
    is_here = (column >= 0) & (column < columns)
    target = tl.load(logits + column, mask=is_here, other=0.0)
    if HAS_CAP:
        target = cap * _tanh(target / cap)
    tl.store(stats + 3 * num_tokens, target * scale, mask=is_here)


@triton.jit
def _logit_gradients(  # type: ignore[no-untyped-def]
    logits,
    grads,
    targets,
    largest,
    log_sum,
    entropy,
    grad_logp,
    grad_entropy,
    first,
    columns,
    scale,
    cap,
    HAS_CAP: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    is_column = place < columns
    start = row.to(tl.int64) * WIDTH
    logit = tl.load(logits + start + place, mask=is_column, other=0.0)
    if HAS_CAP:
        bent = _tanh(logit / cap)
        logit = cap * bent
    log_p = logit * scale - tl.load(largest + row) - tl.load(log_sum + row)
    own = tl.load(grad_logp + row)
    slope = own
    if HAS_ENTROPY:
        slope = own + tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    grad = -tl.exp(log_p) * slope
    grad += tl.where(place == tl.load(targets + row) - first, own, 0.0)
    if HAS_CAP:
        grad *= 1 - bent * bent
    tl.store(grads + start + place, (grad * scale).to(grads.dtype.element_ty), mask=is_column)


def _multiply(
    left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, is_added: bool = False
) -> None:
    """Writes left @ right, accumulated in fp32, to `out`, or adds the product to `out`."""
    if left.is_cuda and left.dtype != out.dtype:
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=int(is_added), out=out)
    else:  # on CPU torch has no product whose output has another type
        left, right = left.to(out.dtype), right.to(out.dtype)
        torch.addmm(out, left, right, beta=int(is_added), out=out)


def _chunks(weight_VD: torch.Tensor, width: int) -> Iterator[tuple[int, torch.Tensor]]:
    for first in range(0, weight_VD.size(0), width):
        yield first, weight_VD[first : first + width]


def _width(num_tokens: int, num_columns: int) -> int:
    """Returns the number of columns in a chunk, a power of two so that few widths are compiled."""
    column_bytes = BYTES_PER_LOGIT * max(num_tokens, 1)
    most = min(max(num_columns // 8, LEAST_BYTES // column_bytes), MOST_BYTES // column_bytes)
    return min(max(1 << most.bit_length() >> 1, LEAST_WIDTH), MOST_WIDTH)


def _warps(width: int) -> int:
    return min(max(width // COLUMNS_PER_WARP, 4), 16)
