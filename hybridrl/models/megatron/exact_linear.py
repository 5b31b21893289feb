"""Product of a linear layer whose bits for a row do not depend on the other rows."""

from __future__ import annotations

from typing import Any

import torch

from hybridrl import ops


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
