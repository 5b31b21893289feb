"""The product of tokens and FP8 weights as an operation of torch, which torch.compile does not look
into, so that every call can choose: few tokens are multiplied without being rounded to FP8, more
tokens by the engine's own product.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridrl import ops

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
_library = torch.library.Library("hybridrl", "FRAGMENT")
_library.define("fp8_linear(Tensor x, Tensor weight, Tensor scales) -> Tensor")
_engines: list[Product] = []


def multiply_many_tokens_by(product: Product) -> None:
    """Sets the engine's product of rows, (M, K), weights, (N, K), and scales, one per process."""
    _engines[:] = [product]


def _product(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Returns x @ W.T, (..., N); x has shape (..., K)."""
    rows = x.flatten(0, -2)
    ops.prepare_fp8_products(x.device)
    if ops.fp8_product_fits(len(rows), weight):
        y = ops.fp8_product(rows, weight, scales)
    else:
        y = _engines[0](rows, weight, scales)
    return y.view(*x.shape[:-1], weight.size(0))


for _device in ("CUDA", "CPU"):
    _library.impl("fp8_linear", _product, _device)
_library.impl(
    "fp8_linear", lambda x, weight, scales: x.new_empty(*x.shape[:-1], weight.size(0)), "Meta"
)
