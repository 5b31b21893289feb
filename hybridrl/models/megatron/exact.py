"""Makes a Megatron model compute the same bits as an engine, whatever the batch.

Replaces the forward passes of linear layers, norms, SwiGLU, attention and the output layer by
operations whose result for a token depends only on the token's sequence (ops.py, `invariant_*`).
The engine calls the same operations (rollout/hf/exact.py, rollout/vllm/exact.py, and on GPUs
rollout/vllm/exact_gpu.py). Backward passes are the usual ones. Other activations and residual
additions are computed element by element, by the same formulas and in the same types on both sides,
so they need no replacement; on CPU, neither do rotary positions. On GPUs, attention itself rotates
queries and keys (packed_exactly.py).

Experts run one after another, in the order of their indices, on the tokens that chose them; each
adds its weighted output to the result, as in the hf engine. Megatron's own dispatcher would sort
tokens by expert and add up in another order. Routers compute in float32 on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from hybridrl import ops
from hybridrl.errors import ModelError
from hybridrl.models.megatron.attention import PackedAttention
from hybridrl.models.megatron.heads import LanguageModel
from hybridrl.models.megatron.layers import LeanMlp
from hybridrl.models.megatron.norm import RMSNorm
from hybridrl.models.megatron.packed_exactly import EngineKernels, PackedExactly
from hybridrl.models.megatron.post_norm import PostNorm
from hybridrl.models.megatron.router import Router

Attend = Callable[..., torch.Tensor]


def compute_exactly(
    chunks: Sequence[torch.nn.Module],
    attend: Attend | None = None,
    kernels: EngineKernels | None = None,
) -> None:
    """Replaces the operations of a model's chunks.

    Args:
        attend: The engine's attention on CPU, with the arguments of `by_blocks`, which is the
            default.
        kernels: The engine's operations on GPUs; None on CPU.

    Raises ModelError if a module with parameters has no such operation.
    """
    for chunk in chunks:
        for name, module in chunk.named_modules():
            part: Any = module
            if isinstance(part, ColumnParallelLinear | RowParallelLinear):
                part._forward_impl = _linear
            elif isinstance(part, RMSNorm):
                part.forward = partial(_norm, part)  # type: ignore[method-assign]
            elif isinstance(part, PostNorm):
                part.forward = partial(_post_norm, part)  # type: ignore[method-assign]
            elif isinstance(part, PackedAttention):
                if kernels is None:
                    part.attend_exactly = partial(ExactAttention.apply, attend or by_blocks)
                else:
                    part.attend_packed = PackedExactly(kernels, part.scale, part.num_before)
            elif isinstance(part, LanguageModel):
                part.exact_logps = ops.invariant_logps if kernels is None else kernels.logps
                part.rotates_in_attention = kernels is not None
            elif isinstance(part, MoELayer) and kernels is None:
                mix_exactly(part)
            elif isinstance(part, MLP) and part.config.activation_func is F.silu:
                if isinstance(part, LeanMlp):
                    part._activated = _activated  # type: ignore[method-assign]
                else:
                    part.forward = partial(_feed_forward, part)
            elif (
                any(True for _ in part.parameters(recurse=False))
                and "embedding" not in name
                and not (isinstance(part, Router) and kernels is None)
            ):
                raise ModelError(
                    "numerics.match",
                    "exact",
                    f"close with {type(part).__name__} ({name})",
                    "Set numerics.match=close.",
                )


def _linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    sequence_parallel: bool,
    allreduce_dgrad: bool,
    tp_group: dist.ProcessGroup | None,
    **_: Any,
) -> torch.Tensor:
    if sequence_parallel:
        input = gather_from_sequence_parallel_region(input, group=tp_group)
    elif allreduce_dgrad:
        input = copy_to_tensor_model_parallel_region(input, group=tp_group)
    return multiply(input, weight, bias)


def _feed_forward(
    mlp: MLP, hidden_states: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    widened, bias = mlp.linear_fc1(hidden_states)
    output, output_bias = mlp.linear_fc2(_activated(widened, bias))
    return output, output_bias


def _activated(
    widened: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
) -> torch.Tensor:
    assert scale is None  # only experts have one
    found: torch.Tensor = _Swiglu.apply(widened if bias is None else widened + bias)
    return found


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return ops.invariant_swiglu(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return ops.invariant_swiglu_backward(grad, x)


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
        found = ops.invariant_rms_norm_backward(grad, x, weight_D, inverse, ctx.is_centered)
        return *found, None, None


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
        position_BQ: Position of each query in its sequence; one row if all sequences have the same
            positions.
        num_before: Number of earlier positions that a query attends to; None for all of them.
            Both are also in `is_seen_BQS`.
    """
    return ops.invariant_attention(query_BHQD, key_BHSD, value_BHSD, is_seen_BQS, scale)


class ExactAttention(torch.autograd.Function):
    """Attention with the forward pass `attend`; the other arguments are those of `by_blocks`."""

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


def mix_exactly(layer: MoELayer) -> None:
    """Replaces the forward passes of a layer and its router; ModelError for unsupported experts."""
    experts: Any = layer.experts
    if not isinstance(experts, SequentialMLP) or layer.use_shared_expert:
        raise ModelError(
            "numerics.match",
            "exact",
            f"close with {type(experts).__name__}"
            + (" and shared experts" if layer.use_shared_expert else ""),
            "Set numerics.match=close.",
        )
    router: Any = layer.router
    router.gating = lambda input: multiply(input.float(), router.weight.float(), None)
    layer.forward = partial(_mixture, layer)  # type: ignore[method-assign]


def _mixture(
    layer: MoELayer,
    hidden_states: torch.Tensor,
    intermediate_tensors: None = None,
    padding_mask: torch.Tensor | None = None,
) -> tuple[torch.Tensor, None]:
    """Takes the place of `MoELayer.forward` on one rank.

    Args:
        padding_mask: (1, S) bool, true at padding; None if there is no padding.
    """
    mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
    probs_TE, chosen_TE = layer.route(hidden_states, mask)
    rows_TD = hidden_states.reshape(-1, hidden_states.size(-1))
    result_TD = torch.zeros_like(rows_TD)
    experts: Any = layer.experts
    for number, expert in enumerate(experts.local_experts):
        token_R = chosen_TE[:, number].nonzero()[:, 0]
        # An expert without tokens also runs, because the optimizer expects its gradient.
        output_RD, _ = expert(rows_TD[token_R])
        weight_R1 = probs_TE[token_R, number, None].to(output_RD.dtype)
        result_TD = result_TD.index_add(0, token_R, output_RD * weight_R1)
    return result_TD.view(hidden_states.shape), None


def multiply(x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None) -> torch.Tensor:
    found: torch.Tensor = Linear.apply(x, weight_NK, bias_N)
    return found


class Linear(torch.autograd.Function):
    """A product with the bits of an engine, and the usual gradients."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight_NK: torch.Tensor, bias_N: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight_NK)
        rows_MK = x.reshape(-1, x.size(-1))
        return ops.invariant_linear(rows_MK, weight_NK, bias_N).view(*x.shape[:-1], len(weight_NK))

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        x, weight_NK = ctx.saved_tensors
        grad_MN = grad.reshape(-1, grad.size(-1))
        grad_x = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad_MN @ weight_NK).view(x.shape)
        if ctx.needs_input_grad[1]:
            grad_weight = grad_MN.T @ x.reshape(-1, x.size(-1))
        if ctx.needs_input_grad[2]:
            grad_bias = grad_MN.sum(0)
        return grad_x, grad_weight, grad_bias
