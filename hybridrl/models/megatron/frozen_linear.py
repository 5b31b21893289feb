"""Computes a frozen linear layer together with its adapters: W x + s B A x.

The layer's own module would write its output before the adapters are added to it, and would hide
its gathered input and its partial sums. Here one function computes both products:

* The small products start the sums, and the large ones add to them. So no activation is read and
  written only to add an adapter's part.
* With tensor and sequence parallelism, the layer's own two collectives are the only large ones. A
  column-parallel layer computes A x from the input that is gathered for W. A row-parallel layer
  adds B A x to its partial sums before they are summed. In the same way, the adapters' gradients
  are added to the layer's own. In the backward pass of column-parallel layers, one collective of
  width `rank` remains, which runs at the same time as the product with W.

W has no gradient, so nothing is stored for it. Invariant: the result is that of the module, up to
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

Places = tuple[torch.Tensor, torch.Tensor]

# Backends of the tensor-parallel group with which this has been tested. With others, the layer's
# own module computes it.
TESTED_BACKENDS = ("gloo",)


@dataclass(frozen=True)
class FrozenLinear:
    """Properties of a linear layer apart from its product; see `frozen_linear`.

    Args:
        norm: Norm that the layer applies to its input, or None.
        group: Tensor-parallel group among which the sequence is split, or None.
        is_row: Whether the output is a sum over the group.
    """

    norm: Callable[[torch.Tensor], torch.Tensor] | None
    group: dist.ProcessGroup | None
    is_row: bool
    adds_bias: bool
    returns_bias: bool

    def __call__(
        self,
        linear: Any,
        hidden: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        places: Places | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output with the adapters' part, and the bias that the caller must add.

        Args:
            linear: Module with `weight` and `bias`, both without gradients.
            hidden: Input, (..., inputs).
            a: A of all projections, (projections x rank, inputs).
            b: (rows, rank).
            places: See `one_matrix`.
        """
        if self.norm is not None:
            hidden = self.norm(hidden)
        bias = linear.bias if self.adds_bias else None
        output = _Product.apply(
            hidden, a, b, linear.weight, bias, places, scale, self.group, self.is_row
        )
        return output, linear.bias if self.returns_bias else None


def frozen_linear(linear: Any, group: dist.ProcessGroup | None) -> FrozenLinear | None:
    """Returns how to compute a layer of Megatron or transformer-engine; None if its module must
    compute it: in FP8, with collectives other than those of sequence parallelism, or with a backend
    that is not among TESTED_BACKENDS.
    """
    if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
        is_row = isinstance(linear, RowParallelLinear)
        if not linear.input_is_parallel if is_row else linear.gather_output:
            return None
        norm, has_bias, returns_bias = None, linear.bias is not None, linear.skip_bias_add
    elif hasattr(linear, "te_return_bias") and hasattr(linear, "parallel_mode"):
        is_row = linear.parallel_mode == "row"
        norm = _norm(linear) if hasattr(linear, "layer_norm_weight") else None
        has_bias, returns_bias = linear.use_bias, linear.te_return_bias
    else:
        return None
    adds_bias = has_bias and not returns_bias
    if linear.config.fp8:
        return None
    if group is not None and (not linear.sequence_parallel or (is_row and adds_bias)):
        return None  # each rank would add the bias
    if group is not None and dist.get_backend(group) not in TESTED_BACKENDS:
        return None
    return FrozenLinear(norm, group, is_row, adds_bias, has_bias and returns_bias)


def _norm(linear: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    from transformer_engine.pytorch import LayerNorm, RMSNorm

    kind = RMSNorm if linear.normalization == "RMSNorm" else LayerNorm
    norm: Any = kind(
        linear.in_features,
        eps=linear.eps,
        zero_centered_gamma=linear.zero_centered_gamma,
        dtype=linear.layer_norm_weight.dtype,
        device="meta",
    )
    norm.weight = linear.layer_norm_weight
    if kind is LayerNorm:
        norm.bias = linear.layer_norm_bias
    return norm  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """Returns W x + s B A x, (..., outputs); x and the output are sharded as the module's."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        places: Places | None,
        scale: float,
        group: dist.ProcessGroup | None,
        is_row: bool,
    ) -> torch.Tensor:
        own = hidden.reshape(-1, hidden.size(-1))
        whole = own if group is None or is_row else gathered(own, group)
        matrix = b if places is None else one_matrix(b, places, weight.size(0), a.size(0))
        inner = whole @ a.T  # of row-parallel layers, a partial sum
        if bias is None:
            sums = scaled_product(inner, matrix.T, scale)
        else:
            sums = torch.addmm(bias, inner, matrix.T, alpha=scale)
        sums.addmm_(whole, weight.T)
        ctx.save_for_backward(own, inner, a, matrix, weight)
        ctx.places, ctx.rank, ctx.scale = places, b.size(1), scale
        ctx.group, ctx.is_row, ctx.shape = group, is_row, hidden.shape
        if group is not None and is_row:
            sums, work = summed(sums, group)
            work.wait()
        # The sequence is the first dimension, and the only one that is gathered or split.
        return sums.view(-1, *hidden.shape[1:-1], weight.size(0))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        own, inner, a, matrix, weight = ctx.saved_tensors
        is_column = ctx.group is not None and not ctx.is_row
        grad = grad.reshape(-1, grad.size(-1))
        if ctx.group is not None and ctx.is_row:
            grad = gathered(grad, ctx.group)
        grad_x = grad_a = grad_b = None
        grad_inner = own_inner = scaled_product(grad, matrix, ctx.scale)
        works = []
        if is_column and ctx.needs_input_grad[1]:
            own_inner, work = summed(grad_inner, ctx.group)
            works.append(work)
        if ctx.needs_input_grad[0]:
            grad_x = (grad_inner @ a).addmm_(grad, weight)
            if is_column:
                grad_x, work = summed(grad_x, ctx.group)
                works.append(work)
        if ctx.needs_input_grad[2]:
            grad_b = scaled_product(grad.T, inner, ctx.scale)
            if ctx.places is not None:
                grad_b = grad_b.view(matrix.size(0), -1, ctx.rank)[ctx.places]
        for work in works:
            work.wait()
        if ctx.needs_input_grad[1]:
            grad_a = own_inner.T @ own
        if grad_x is not None:
            grad_x = grad_x.view(ctx.shape)
        return grad_x, grad_a, grad_b, None, None, None, None, None, None


def one_matrix(b: torch.Tensor, places: Places, outputs: int, inputs: int) -> torch.Tensor:
    """Returns B as one matrix from the stacked A x to all output rows, (outputs, inputs).

    Args:
        b: (rows, rank).
        places: Output row and projection of each row of b.
    """
    found = b.new_zeros(outputs, inputs)
    found.view(outputs, -1, b.size(1))[places] = b
    return found


def scaled_product(left: torch.Tensor, right: torch.Tensor, scale: float) -> torch.Tensor:
    unused = left.new_empty(1)  # with beta=0, addmm does not read it
    return torch.addmm(unused, left, right, beta=0, alpha=scale)


def gathered(part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    found = part.new_empty(group.size() * part.size(0), *part.shape[1:])
    dist.all_gather_into_tensor(found, part.contiguous(), group=group)
    return found


def summed(sums: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    """Returns this rank's rows of a sum over the ranks, once the returned work has been waited for.

    The work keeps the input alive.
    """
    found = sums.new_empty(sums.size(0) // group.size(), *sums.shape[1:])
    work = dist.reduce_scatter_tensor(found, sums.contiguous(), group=group, async_op=True)
    return found, work
