"""Names a package's live parameters as `fused_layout` does, and shares the trainer's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from hybridrl.hybrid_engine.memory.alias import shared_views
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import RankLayout

WRAPPED = ".base_layer"  # part of the names of parameters in layers with adapters
# Stacks of a rank's experts: gate and up, and down; weights, scales of FP8 weights, and biases.
STACKS = (
    "w13_weight",
    "w2_weight",
    "w13_weight_scale_inv",
    "w2_weight_scale_inv",
    "w13_bias",
    "w2_bias",
)


Names = Callable[[str], str | None]
"""Translates a package's parameter name into the name in `fused_layout`; returns None if the
parameter is a copy of others, which the layout does not contain.
"""


def live_tensors(model: torch.nn.Module, layout_name: Names) -> dict[str, Tensor]:
    """Returns the live parameters by their names in `fused_layout`. A parameter that stacks this
    rank's experts, (E, rows, columns) or (E, rows), is returned as one matrix or bias per expert,
    named `<parameter>/<index>`.
    """
    found: dict[str, Tensor] = {}
    for own_name, parameter in model.named_parameters():
        name = layout_name(own_name.replace(WRAPPED, ""))
        if name is None:
            continue
        if name.rpartition(".")[2] in STACKS:
            found |= {f"{name}/{i}": one for i, one in enumerate(parameter.data)}
        else:
            found[name] = parameter.data
    return found


def share(
    model: torch.nn.Module,
    shard: TrainingShard | None,
    layout: RankLayout,
    layout_name: Names,
    wide: Collection[str] = (),
) -> dict[str, Tensor]:
    """Replaces engine parameters by views of trainer parameters with the same content, except those
    in `wide` (WideRouters). Returns all views by name in the layout; a stack of experts is one
    view.
    """
    if shard is None:
        return {}
    live = {layout_name(name): parameter for name, parameter in model.named_parameters()}
    views = shared_views(shard, layout, next(iter(live.values())).dtype)
    for name, view in views.items():
        if name not in wide:
            live[name].data = view
    return views


def free_bytes(device: torch.device) -> int:
    """Returns the device's free bytes after releasing cached memory; 0 on CPU."""
    if device.type == "cpu":
        return 0
    # Collect garbage first. If the start of the engine freed it instead, the engine would seem to
    # use less memory than it does, in one case by 9 GiB.
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
