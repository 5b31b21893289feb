"""Lets a transformers model compute with LoRA adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrl.models.adapters.rows import HF_A, HF_B
from hybridrl.models.boxes import Shape


def hold_adapters(model: torch.nn.Module, shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Adds adapters, which are all zero at first, to a model's linear layers.

    Args:
        model: Model of transformers.
        shapes: Shape of every adapter tensor by HF name.

    Returns:
        The adapters' tensors by HF name. B already contains the scale s, so the layers add B A x.
    """
    found: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if not name.endswith(HF_A):
            continue
        module = name.removesuffix(f".{HF_A}")
        linear = model.get_submodule(module)
        weight: Any = linear.weight
        a = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        b_name = f"{module}.{HF_B}"
        b = torch.zeros(shapes[b_name], dtype=weight.dtype, device=weight.device)
        linear.register_forward_hook(_Added(a, b))
        found |= {name: a, b_name: b}
    return found


class _Added:
    """Forward hook that adds B A x to a linear layer's output."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self._a, self._b = a, b

    def __call__(self, _: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        linear = torch.nn.functional.linear
        return output + linear(linear(inputs[0], self._a), self._b)
