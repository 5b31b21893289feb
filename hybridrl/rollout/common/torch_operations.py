"""Products with adapters and FP8 weights, as operations that torch.compile does not look into.

The product A x of an adapter is computed on a second GPU stream, at the same time as the layer's
own product. Small numbers of tokens are multiplied by FP8 weights without rounding the tokens to
FP8; for more tokens the engine's own product is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from hybridrl import ops

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
SLOT = 0  # index of the only adapter

_engines: list[Product] = []
_library = torch.library.Library("hybridrl", "FRAGMENT")
_library.define("adapter_down(Tensor x, Tensor a) -> Tensor")
_library.define("adapter_up(Tensor(a!) y, Tensor down, Tensor x, Tensor[] bs, Tensor slots) -> ()")
_library.define("fp8_linear(Tensor x, Tensor weight, Tensor scales) -> Tensor")


@cache
def _second_stream(current: torch.cuda.Stream) -> torch.cuda.Stream:
    """Returns the second stream of a stream. Streams do not share one, because the memory of A x
    may be reused as soon as the stream has passed `_up`.
    """
    return torch.cuda.Stream(current.device)


def _down(x: Tensor, a: Tensor) -> Tensor:
    """Returns A x. On a GPU it is computed on the second stream, for which `_up` waits."""
    if not x.is_cuda:
        return torch.mm(x, a.T)
    current = torch.cuda.current_stream(x.device)
    second = _second_stream(current)
    second.wait_stream(current)
    with torch.cuda.stream(second):
        return torch.mm(x, a.T)


def _up(y: Tensor, down: Tensor, x: Tensor, bs: Sequence[Tensor], slots: Tensor) -> None:
    """Adds B `down` to y. The argument x keeps its memory in use while `_down` reads it."""
    if y.is_cuda:
        current = torch.cuda.current_stream(y.device)
        current.wait_stream(_second_stream(current))
    ops.add_up(y, down, bs, slots[: x.size(0)], SLOT)


def multiply_many_tokens_by(product: Product) -> None:
    """Sets the process's only product: a function of rows (M, K), weights (N, K) and scales."""
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
    _library.impl("adapter_down", _down, _device)
    _library.impl("adapter_up", _up, _device)
    _library.impl("fp8_linear", _product, _device)
_library.impl("adapter_down", lambda x, a: x.new_empty(x.size(0), a.size(0)), "Meta")
_library.impl("adapter_up", lambda *_: None, "Meta")
_library.impl(
    "fp8_linear", lambda x, weight, scales: x.new_empty(*x.shape[:-1], weight.size(0)), "Meta"
)
