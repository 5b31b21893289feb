"""Lets a transformers model compute with LoRA adapters, a different one for each row of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.wrapped_models import text_name
from hybridrl.models.adapters.rows import HF_A, HF_B
from hybridrl.models.boxes import Shape

Pair = tuple[Tensor, Tensor]
"""A and B of one adapter. B already contains the scale s, so that layers add B A x."""


class RowAdapters:
    """The adapter of each row of a batch; at first, the first of `names`.

    `of_rows` has each row's adapter; None for none. A batch's inputs are its rows' tokens in order,
    with or without a dimension for the rows.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.of_rows: Sequence[str | None] = names[:1]

    def use(self, names: Sequence[str | None]) -> None:
        """Selects the adapter of each row of the next forward passes; None selects no adapter."""
        self.of_rows = names


def hold_linear_adapters(
    model: torch.nn.Module, shapes: Mapping[str, Shape], rows: RowAdapters
) -> dict[str, dict[str, Tensor]]:
    """Adds adapters named in `rows`, which are all zero at first, to a model's linear layers.
    `shapes` has every adapter tensor's shape by HF name. Returns each adapter's tensors by HF name.
    """
    found: dict[str, dict[str, Tensor]] = {name: {} for name in rows.names}
    linears: dict[str, Any] = {text_name(name): one for name, one in model.named_modules()}
    for a_name, shape in shapes.items():
        if not a_name.endswith(HF_A):
            continue
        module = a_name.removesuffix(f".{HF_A}")
        linear = linears[module]
        weight = linear.weight
        b_name = f"{module}.{HF_B}"
        pairs = {}
        for name, tensors in found.items():
            for part, size in ((a_name, shape), (b_name, shapes[b_name])):
                tensors[part] = torch.zeros(size, dtype=weight.dtype, device=weight.device)
            pairs[name] = tensors[a_name], tensors[b_name]
        linear.register_forward_hook(_Added(pairs, rows))
    return found


class _Added:
    def __init__(self, pairs: Mapping[str, Pair], rows: RowAdapters) -> None:
        self._pairs, self._rows = pairs, rows

    def __call__(self, _: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        linear, names = torch.nn.functional.linear, self._rows.of_rows
        used = list(dict.fromkeys(names))
        if len(used) == 1:
            if used[0] is None:
                return output
            a, b = self._pairs[used[0]]
            return output + linear(linear(inputs[0], a), b)
        x_BLD = inputs[0].reshape(len(names), -1, inputs[0].shape[-1])
        added_BLD = torch.zeros_like(output).view(len(names), -1, output.shape[-1])
        for name in used:
            if name is not None:
                a, b = self._pairs[name]
                rows = torch.tensor([i for i, one in enumerate(names) if one == name])
                rows = rows.to(output.device)
                added_BLD[rows] = linear(linear(x_BLD[rows], a), b)
        return output + added_BLD.view_as(output)
