"""Makes vLLM's layers multiply few tokens by FP8 weights without rounding the tokens, where it was
measured (kernels/fp8_linear.py).

vLLM's kernels quantize the inputs of every product. While few tokens are decoded, that takes longer
than FP8 weights save: with Qwen2.5-7B and 64 requests of 1.5k to 2k tokens, a step took 7.2 ms,
with bf16 weights 6.7 ms (one H200). With unrounded tokens it took 6.84 ms, and with bf16 weights
6.67 ms (another H200).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hybridrl import ops
from hybridrl.rollout.common.torch_operations import multiply_many_tokens_by


def multiply_unrounded_tokens(model: torch.nn.Module, max_batch: int) -> None:
    """Makes linear layers with FP8 weights multiply few tokens without rounding them, if that was
    measured for a weight's sizes and `max_batch` tokens. An engine that decodes more requests at
    once would mostly use vLLM's product, without the fusions of torch.compile.
    """
    kinds: dict[type, type] = {}
    kernel: Any = None
    part: Any
    for part in model.modules():
        method: Any = getattr(part, "quant_method", None)
        kind = type(method)
        if kind.__name__ == "Fp8LinearMethod" and ops.fp8_product_fits(max_batch, part.weight):
            kernel = method.fp8_linear  # all layers have the same kernel and types
            kinds.setdefault(kind, type(kind.__name__, (kind,), {"apply": _apply}))
            method.__class__ = kinds[kind]

    def product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        # Inside torch.compile, vLLM quantizes with operations that the compiler fuses. Here they
        # would run in several launches; `forward_cuda` is vLLM's kernel for the same.
        codes, code_scales = kernel.quant_fp8.forward_cuda(rows.contiguous())
        y: Tensor = kernel.apply_block_scaled_mm(A=codes, B=weight, As=code_scales, Bs=scales)
        return y

    if kernel is not None:  # otherwise an earlier engine in this process keeps its product
        multiply_many_tokens_by(product)


def _apply(method: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """Replaces `apply` of vLLM's method. x has shape (..., inputs)."""
    y: Tensor = torch.ops.hybridrl.fp8_linear(x, layer.weight, layer.weight_scale_inv)
    return y if bias is None else y + bias
