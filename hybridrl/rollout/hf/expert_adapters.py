"""Lets a transformers model compute with LoRA adapters on its experts, one adapter per row.

transformers 5 computes a layer's stacked experts with grouped products, which cannot add an
adapter. Layers with adapters compute their experts one by one instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from hybridrl.errors import ModelError
from hybridrl.models.adapters.rows import HF_A, HF_B, base_of, modules, only_adapters
from hybridrl.models.boxes import Shape
from hybridrl.models.family import Family, ModelShape, Row
from hybridrl.rollout.hf.linear_adapters import Pair, RowAdapters

EXPERTS = "mlp.experts"  # transformers' name of a layer's stacked experts


class _Pairs(NamedTuple):
    """A, (experts, rank, in), and B, (experts, out, rank), of the three projections."""

    gate: Pair
    up: Pair
    down: Pair


def hold_expert_adapters(
    model: torch.nn.Module, family: Family, shape: ModelShape, rows: RowAdapters
) -> dict[str, dict[str, Tensor]]:
    """Adds adapters named in `rows`, which are all zero at first, to a model's experts.

    Returns the tensors of each adapter by HF name; empty if experts have no adapters. Raises
    ModelError if transformers computes the experts in another way than activation(gate) * up.
    """
    found: dict[str, dict[str, Tensor]] = {name: {} for name in rows.names}
    sizes = {
        part: size
        for row in only_adapters(family).rows(shape)
        if row.num_experts
        for part, size in zip(row.parts, row.shapes, strict=True)
    }
    if not sizes:
        return found
    projections = [row for row in base_of(family).rows(shape) if row.num_experts]
    before, _, _ = projections[0].parts[0].partition("{L}")
    for layer in projections[0].layers_of(shape):
        experts: Any = model.get_submodule(f"{before}{layer}.{EXPERTS}")
        _check(experts, shape)
        pairs = {
            name: _Pairs(
                *(p for row in projections for p in _pairs(row, layer, sizes, experts, tensors))
            )
            for name, tensors in found.items()
        }
        experts.forward = partial(_forward, experts, pairs, rows)
    return found


def _pairs(
    row: Row, layer: int, sizes: Mapping[str, Shape], experts: Any, found: dict[str, Tensor]
) -> Sequence[Pair]:
    """Returns A and B of each projection in a row, and adds their parts to `found`."""
    pairs = []
    for module in modules(row):
        pair = []
        for kind in (HF_A, HF_B):
            part = f"{module}.{kind}"
            stacked = experts.down_proj.new_zeros(row.num_experts, *sizes[part])
            found |= {part.format(L=layer, E=e): one for e, one in enumerate(stacked)}
            pair.append(stacked)
        pairs.append((pair[0], pair[1]))
    return pairs


def _check(experts: Any, shape: ModelShape) -> None:
    usual = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
    is_usual = all(getattr(experts, name, value) == value for name, value in usual.items())
    if not is_usual or shape.activation == "clamped_swiglu":
        raise ModelError(
            "lora.targets",
            f"experts of a model with {type(experts).__name__} and rollout.engine=hf",
            "experts without biases that compute activation(gate) * up",
            "Remove experts from lora.targets, or use another rollout engine.",
        )


def _forward(
    experts: Any,
    pairs: Mapping[str, _Pairs],
    rows: RowAdapters,
    hidden_TD: Tensor,
    chosen_TK: Tensor,
    weights_TK: Tensor,
) -> Tensor:
    output_TD = torch.zeros_like(hidden_TD)
    adapters = list(dict.fromkeys(rows.of_rows))
    adapter_T = torch.zeros(len(hidden_TD), dtype=torch.long)
    if len(adapters) > 1:
        of_rows = torch.tensor([adapters.index(name) for name in rows.of_rows])
        adapter_T = of_rows.repeat_interleave(len(hidden_TD) // len(of_rows))
    adapter_T = adapter_T.to(hidden_TD.device)
    # A sync point, as in transformers' own loop.
    for expert in chosen_TK.unique().tolist():
        for number, name in enumerate(adapters):
            is_meant_TK = (chosen_TK == expert) & (adapter_T == number)[:, None]
            token, place = torch.where(is_meant_TK)
            own = None if name is None else pairs[name]
            output = _output(experts, own, expert, hidden_TD[token])
            output = output * weights_TK[token, place, None]
            output_TD.index_add_(0, token, output.to(output_TD.dtype))
    return output_TD


def _output(experts: Any, pairs: _Pairs | None, expert: int, x: Tensor) -> Tensor:
    gate, up = linear(x, experts.gate_up_proj[expert]).chunk(2, dim=-1)
    if pairs is not None:
        gate, up = gate + _added(x, pairs.gate, expert), up + _added(x, pairs.up, expert)
    inner = experts.act_fn(gate) * up
    output = linear(inner, experts.down_proj[expert])
    return output if pairs is None else output + _added(inner, pairs.down, expert)


def _added(x: Tensor, pair: Pair, expert: int) -> Tensor:
    a, b = pair
    return linear(linear(x, a[expert]), b[expert])
