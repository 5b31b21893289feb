"""Returns a transformers model's parameters by their names in an HF checkpoint.

transformers 5 stacks experts in memory, `mlp.experts.gate_up_proj` (E, 2 * width, hidden) and
`down_proj` (E, hidden, width). The checkpoint contains one matrix per expert, under the family's
names. If the checkpoint contains stacks too, the result has their slices (stored_slices.py). Every
matrix returned here is a view, so writing to it changes the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.wrapped_models import text_name
from hybridrl.errors import ModelError
from hybridrl.models.adapters.rows import base_of
from hybridrl.models.family import Family, Row, is_kept_in_fp32, resolve_family
from hybridrl.models.hf.stored_slices import StoredSlice

GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
BLOCK = ".mlp."  # transformers' name of a feed-forward layer, which may differ in the checkpoint


def checkpoint_tensors(
    model: torch.nn.Module, hf_config: Mapping[str, Any], family: Family | None = None
) -> dict[str, Tensor]:
    """Returns a model's parameters and buffers (not copies), by their names in the checkpoint.

    Args:
        family: Family of the model, needed if experts are stacked; found from `hf_config` by
            default.

    Raises ModelError if experts are stacked, but the family has no experts.
    """
    tensors = {text_name(name): parameter.data for name, parameter in model.named_parameters()}
    tensors |= {n: buffer for n, buffer in model.named_buffers() if is_kept_in_fp32(n)}
    if not any(name.endswith((GATE_UP, DOWN)) for name in tensors):
        return tensors
    family = family or resolve_family(None, hf_config)
    places = _slices(family, hf_config)
    if places:
        return _sliced(model, tensors, places)
    gate_up, down = _expert_rows(family, hf_config)
    before, block = gate_up.parts[0].split("experts.")[0].split("{L}")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        head, is_block, rest = name.partition(BLOCK)
        if not is_block or not head.startswith(before):
            found[name] = tensor
            continue
        layer = int(head.removeprefix(before))
        if rest == GATE_UP:
            halves = tensor.chunk(2, dim=1)
            for part, half in zip(gate_up.parts, halves, strict=True):
                found |= {part.format(L=layer, E=i): matrix for i, matrix in enumerate(half)}
        elif rest == DOWN:
            found |= {down.parts[0].format(L=layer, E=i): matrix for i, matrix in enumerate(tensor)}
        elif gate_up.layers is None or layer in gate_up.layers:
            found[f"{head}{block}{rest}"] = tensor
        else:
            found[name] = tensor
    return found


def _slices(family: Family, hf_config: Mapping[str, Any]) -> dict[str, list[tuple[str, bool]]]:
    shape, found = family.shape(hf_config), dict[str, list[tuple[str, bool]]]()
    for row in family.rows(shape):
        for layer in row.layers_of(shape) if row.num_experts else ():
            for expert in range(row.num_experts):
                name = row.parts[0].format(L=layer, E=expert)
                place = StoredSlice.of(name)
                if place.index is not None:
                    found.setdefault(place.name, []).append((name, place.is_transposed))
    return found


def _sliced(
    model: torch.nn.Module,
    tensors: Mapping[str, Tensor],
    places: Mapping[str, list[tuple[str, bool]]],
) -> dict[str, Tensor]:
    """Replaces stacks by contiguous slices; changes the memory order of transposed stacks."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name not in places:
            found[name] = tensor
            continue
        names, are_transposed = zip(*places[name], strict=True)
        slices = tensor
        if any(are_transposed):
            slices = tensor.mT.contiguous()
            model.get_parameter(name).data = slices.mT
        found |= dict(zip(names, slices, strict=True))
    return found


def _expert_rows(family: Family, hf_config: Mapping[str, Any]) -> tuple[Row, Row]:
    own = base_of(family).rows(family.shape(hf_config))
    rows = {row.kind: row for row in own if row.num_experts}
    if not {"gate_up", "row"} <= rows.keys():
        raise ModelError(
            "config.json: model_type",
            f"{hf_config.get('model_type')}, which has experts in transformers",
            f"a family with experts; {family.name} has none",
            "Choose another model, or set model.family to your own: package.module:FAMILY.",
        )
    return rows["gate_up"], rows["row"]
