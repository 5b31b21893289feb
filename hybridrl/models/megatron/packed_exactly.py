"""Attention over packed sequences with an engine's kernels, whose bits do not depend on the batch.

Rotates queries and keys by one kernel for all sequences, and attends with the engine's own kernel,
so that a token's result has the same bits in training, in a prompt and in a decode step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from hybridrl import ops
from hybridrl.models.megatron.attention import GatherKeys, PackedSequences


class Bounds(NamedTuple):
    """Boundaries of packed sequences, aligned at their ends.

    Args:
        cu_seqlens_q, cu_seqlens_k: Starts of the sequences' queries and keys, followed by the
            totals; int32, on the model's device.
        max_seqlen_q, max_seqlen_k: Lengths of the longest sequence.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True)
class EngineKernels:
    """An engine's operations that the trainer calls in exact mode on GPUs.

    Args:
        attend: Takes queries (T, heads, D), keys and values (K, KV heads, D), `Bounds`, the scale,
            and the number of earlier positions that a query attends to (None for all); returns the
            result, (T, heads, D), and the logarithms of the softmax's sums, (heads, T) fp32.
        attend_backward: Takes the result's gradient, the first three arguments of `attend`, its two
            results and its last three arguments; returns the gradients of queries, keys and values.
        logps: Log-probabilities, with the arguments of `ops.invariant_logps`; may change the
            logits.
    """

    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    attend_backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    logps: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


class RotaryRows(NamedTuple):
    """Rotary angles of packed tokens.

    Args:
        table_LD: For each position, cosines and sines; see `invariant.rotate`.
        row_T: Position of each token.
    """

    table_LD: torch.Tensor
    row_T: torch.Tensor

    @staticmethod
    def of(angles: torch.Tensor, position_T: torch.Tensor, dtype: torch.dtype) -> RotaryRows:
        """Converts Megatron's angles, (L, 1, 1, D) fp32, whose second half repeats the first."""
        return RotaryRows(rotary_table(angles.flatten(1).chunk(2, dim=1)[0], dtype), position_T)


def rotary_table(angles_LF: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat((angles_LF.cos(), angles_LF.sin()), 1).to(dtype)


class PackedExactly:
    """Takes the place of the forward pass of `PackedAttention`.

    Args:
        num_before: Number of earlier positions that a query attends to; None for all of them.
    """

    def __init__(self, kernels: EngineKernels, scale: float, num_before: int | None) -> None:
        self._kernels, self._scale, self._num_before = kernels, scale, num_before

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packed: PackedSequences
    ) -> torch.Tensor:
        """Returns the result for packed tokens, (T, heads * D); arguments are not rotated yet."""
        rows: RotaryRows = packed.derived[RotaryRows]
        query, key = (_Rotate.apply(x, rows.table_LD, rows.row_T) for x in (query, key))
        if packed.shared is not None:
            keys = packed.shared.keys
            key, value = (GatherKeys.apply(x, keys.index_K, keys.readers) for x in (key, value))
        bounds = _bounds(packed, query.device)
        attended: torch.Tensor = _Attend.apply(
            query, key, value, bounds, self._scale, self._num_before, self._kernels
        )
        return attended.flatten(1)


def _bounds(packed: PackedSequences, device: torch.device) -> Bounds:
    if packed.shared is not None:
        keys = packed.shared.keys
        return Bounds(keys.cu_seqlens_q, keys.cu_seqlens_k, keys.max_seqlen_q, keys.max_seqlen_k)
    if Bounds not in packed.derived:
        starts = packed.cu_seqlens_q.to(device, torch.int32)
        most = int(packed.max_seqlen_q)
        packed.derived[Bounds] = Bounds(starts, starts, most, most)
    found: Bounds = packed.derived[Bounds]
    return found


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_THD: torch.Tensor, table_LD: torch.Tensor, row_T: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(table_LD, row_T)
        return ops.invariant_rotate(x_THD, table_LD, row_T)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_THD: torch.Tensor
    ) -> tuple[torch.Tensor, None, None]:
        table_LD, row_T = ctx.saved_tensors
        grad = ops.invariant_rotate(grad_THD.contiguous(), table_LD, row_T, is_inverse=True)
        return grad, None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: torch.Tensor,
        key_KHD: torch.Tensor,
        value_KHD: torch.Tensor,
        bounds: Bounds,
        scale: float,
        num_before: int | None,
        kernels: EngineKernels,
    ) -> torch.Tensor:
        inputs = query_THD, key_KHD, value_KHD
        found, log_sum = kernels.attend(*inputs, bounds, scale, num_before)
        ctx.save_for_backward(*inputs, found, log_sum)
        ctx.bounds, ctx.scale, ctx.num_before = bounds, scale, num_before
        ctx.kernels = kernels
        return found

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_THD: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        grads = ctx.kernels.attend_backward(
            grad_THD.contiguous(), *ctx.saved_tensors, ctx.bounds, ctx.scale, ctx.num_before
        )
        return *grads, None, None, None, None
