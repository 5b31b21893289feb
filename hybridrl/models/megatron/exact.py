"""Makes a Megatron model compute the same bits as an engine, whatever the batch.

Replaces the forward passes of linear layers, norms, attention and the output layer by operations
whose result for a token depends only on the token's sequence (ops.py, `invariant_*`). The hf engine
calls the same operations (rollout/hf/exact.py). Backward passes are the usual ones. Rotary
positions, activations and residual additions are computed element by element, by the same formulas
and in the same types on both sides, so they need no replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from hybridrl import ops
from hybridrl.errors import ModelError
from hybridrl.models.megatron.attention import PackedAttention
from hybridrl.models.megatron.heads import LanguageModel
from hybridrl.models.megatron.norm import RMSNorm
from hybridrl.models.megatron.post_norm import PostNorm

Attend = Callable[..., torch.Tensor]


def compute_exactly(chunks: Sequence[torch.nn.Module], attend: Attend | None = None) -> None:
    """Replaces the operations of a model's chunks.

    Args:
        attend: The engine's attention, with the arguments of `by_blocks`, which is the default.

    Raises:
        ModelError: A module with parameters has no such operation.
    """
    for chunk in chunks:
        for name, part in chunk.named_modules():
            if isinstance(part, ColumnParallelLinear | RowParallelLinear):
                part._forward_impl = _linear
            elif isinstance(part, RMSNorm):
                part.forward = partial(_norm, part)  # type: ignore[method-assign]
            elif isinstance(part, PostNorm):
                part.forward = partial(_post_norm, part)  # type: ignore[method-assign]
            elif isinstance(part, PackedAttention):
                part.attend_exactly = partial(ExactAttention.apply, attend or by_blocks)
            elif isinstance(part, LanguageModel):
                part.is_exact = True
            elif any(True for _ in part.parameters(recurse=False)) and "embedding" not in name:
                raise ModelError(
                    "numerics.match",
                    "exact",
                    f"close with {type(part).__name__} ({name})",
                    "Set numerics.match=close.",
                )


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **_: Any
) -> torch.Tensor:
    """Takes the place of Megatron's product, whose further arguments concern several ranks."""
    product: torch.Tensor = _Product.apply(input, weight)
    return product if bias is None else product + bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight_NK)
        rows_MK = x.reshape(-1, x.size(-1))
        return ops.invariant_product(rows_MK, weight_NK).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight_NK = ctx.saved_tensors
        grad_MN = grad.reshape(-1, grad.size(-1))
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_MN @ weight_NK).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_MN.T @ x.reshape(-1, x.size(-1))
        return grad_x, grad_weight


def _norm(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _Norm.apply(x, norm.weight, norm.eps, norm.is_centered)
    return found


def _post_norm(norm: PostNorm, output: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    config: Any = norm.config
    whole = output if bias is None else output + bias
    found: torch.Tensor = _Norm.apply(
        whole, norm.weight, config.layernorm_epsilon, config.layernorm_zero_centered_gamma
    )
    return found


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_D: torch.Tensor, eps: float, is_centered: bool
    ) -> torch.Tensor:
        result, inverse = ops.invariant_rms_norm(x, weight_D, eps, is_centered)
        ctx.save_for_backward(x, weight_D, inverse)
        ctx.is_centered = is_centered
        return result

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight_D, inverse = ctx.saved_tensors
        unit, wide = x.float() * inverse, grad.float()
        scaled = wide * (weight_D.float() + 1.0 if ctx.is_centered else weight_D.float())
        grad_x = inverse * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
        grad_weight = (wide * unit).reshape(-1, x.size(-1)).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight_D.dtype), None, None


def by_blocks(
    query_BHQD: torch.Tensor,
    key_BHSD: torch.Tensor,
    value_BHSD: torch.Tensor,
    is_seen_BQS: torch.Tensor,
    position_BQ: torch.Tensor,
    num_before: int | None,
    scale: float,
) -> torch.Tensor:
    """Attends as the hf engine does; see `ops.invariant_attention`.

    Args:
        position_BQ: Position of each query in its sequence; one row if all are alike.
        num_before: Number of earlier positions that a query attends to; None for all of them.
            Both are also in `is_seen_BQS`.
    """
    return ops.invariant_attention(query_BHQD, key_BHSD, value_BHSD, is_seen_BQS, scale)


class ExactAttention(torch.autograd.Function):
    """Attention with a given forward pass, and further arguments as `by_blocks`."""

    @staticmethod
    def forward(
        ctx: Any,
        attend: Attend,
        query_BHQD: torch.Tensor,
        key_BHSD: torch.Tensor,
        value_BHSD: torch.Tensor,
        is_seen_BQS: torch.Tensor,
        position_BQ: torch.Tensor,
        num_before: int | None,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query_BHQD, key_BHSD, value_BHSD, is_seen_BQS)
        ctx.scale = scale
        return attend(query_BHQD, key_BHSD, value_BHSD, is_seen_BQS, position_BQ, num_before, scale)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        *inputs, is_seen_BQS = ctx.saved_tensors
        with torch.enable_grad():
            query, key, value = (x.detach().requires_grad_() for x in inputs)
            result = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=is_seen_BQS[:, None],
                scale=ctx.scale,
                enable_gqa=query.size(1) != key.size(1),
            )
            grads = torch.autograd.grad(result, (query, key, value), grad)
        return None, *grads, None, None, None, None
