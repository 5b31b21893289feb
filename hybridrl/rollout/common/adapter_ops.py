"""Operations that add an adapter's product to a layer's output, registered with torch so that
torch.compile does not look into them.

A x is computed on a second stream of the GPU, next to the layer's own product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from hybridrl import ops

SLOT = 0  # of the only adapter

_library = torch.library.Library("hybridrl", "FRAGMENT")
_library.define("adapter_down(Tensor x, Tensor a) -> Tensor")
_library.define("adapter_up(Tensor(a!) y, Tensor down, Tensor x, Tensor[] bs, Tensor slots) -> ()")


@cache
def _second_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _down(x: Tensor, a: Tensor) -> Tensor:
    """Returns A x. On a GPU it is computed on the second stream, for which `_up` waits."""
    if not x.is_cuda:
        return torch.mm(x, a.T)
    second = _second_stream(x.device)
    second.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(second):
        return torch.mm(x, a.T)


def _up(y: Tensor, down: Tensor, x: Tensor, bs: Sequence[Tensor], slots: Tensor) -> None:
    """Adds B `down` to y. The argument x keeps its memory in use while `_down` reads it."""
    if y.is_cuda:
        torch.cuda.current_stream().wait_stream(_second_stream(y.device))
    ops.add_up(y, down, bs, slots[: x.size(0)], SLOT)


for _device in ("CUDA", "CPU"):
    _library.impl("adapter_down", _down, _device)
    _library.impl("adapter_up", _up, _device)
_library.impl("adapter_down", lambda x, a: x.new_empty(x.size(0), a.size(0)), "Meta")
_library.impl("adapter_up", lambda *_: None, "Meta")
