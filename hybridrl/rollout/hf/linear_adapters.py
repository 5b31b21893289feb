"""Lets a transformers model compute with LoRA adapters, a different one for each row of a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridrl.models.adapters.rows import HF_A, HF_B
from hybridrl.models.boxes import Shape


class LinearAdapters:
    """Adapters on a model's linear layers, which are all zero at first.

    Args:
        model: Model of transformers.
        shapes: Shape of every adapter tensor by HF name.
        names: Names of the adapters. The first one is used until `use` is called.
    """

    def __init__(
        self, model: torch.nn.Module, shapes: Mapping[str, Shape], names: Sequence[str]
    ) -> None:
        self.names = tuple(names)
        self._tensors: dict[str, dict[str, Tensor]] = {name: {} for name in names}
        self._rows = _Rows([names[0]])
        for a_name, shape in shapes.items():
            if not a_name.endswith(HF_A):
                continue
            module = a_name.removesuffix(f".{HF_A}")
            linear = model.get_submodule(module)
            weight: Any = linear.weight
            b_name = f"{module}.{HF_B}"
            pairs = {}
            for name, tensors in self._tensors.items():
                for part, size in ((a_name, shape), (b_name, shapes[b_name])):
                    tensors[part] = torch.zeros(size, dtype=weight.dtype, device=weight.device)
                pairs[name] = tensors[a_name], tensors[b_name]
            linear.register_forward_hook(_Added(pairs, self._rows))

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Returns an adapter's tensors by HF name. B already contains the scale s, so the layers
        add B A x.
        """
        return self._tensors[name]

    def use(self, names: Sequence[str | None]) -> None:
        """Selects the adapter of each row of the next forward passes; None selects no adapter."""
        self._rows.names = names


class _Rows:
    """The name of each row's adapter."""

    def __init__(self, names: Sequence[str | None]) -> None:
        self.names = names


class _Added:
    """Forward hook that adds B A x to a linear layer's output.

    Args:
        pairs: A and B of each adapter.
        rows: The rows' adapters. A batch's inputs are its rows' tokens in order, with or without a
            dimension for the rows.
    """

    def __init__(self, pairs: Mapping[str, tuple[Tensor, Tensor]], rows: _Rows) -> None:
        self._pairs, self._rows = pairs, rows

    def __call__(self, _: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        linear, names = torch.nn.functional.linear, self._rows.names
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
