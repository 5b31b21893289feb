"""Names an engine's live parameters as the weight layout does, and shares the trainer's.

Used by engines of packages whose parameters have the layout of `fused_layout`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from hybridrl.hybrid_engine.memory.alias import shared_views
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import RankLayout

STACKS = ("w13_weight", "w2_weight")  # all experts of a rank: gate over up, and down


Names = Callable[[str], str | None]
"""Translates a package's parameter name into that of `fused_layout`; returns None for a copy of
other parameters, which the layout does not contain."""


def live_tensors(model: torch.nn.Module, layout_name: Names) -> dict[str, Tensor]:
    """Returns the live parameters by the names of `fused_layout`. A parameter that stacks this
    rank's experts, (E, rows, columns), becomes one matrix `<parameter>/<index>` per expert.
    """
    found: dict[str, Tensor] = {}
    for own_name, parameter in model.named_parameters():
        name = layout_name(own_name)
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
) -> dict[str, Tensor]:
    """Replaces the engine's parameters by the trainer's where both hold the same content. Returns
    these views by the layout's names, with one view for a stack of experts.
    """
    if shard is None:
        return {}
    live = {layout_name(name): parameter for name, parameter in model.named_parameters()}
    views = shared_views(shard, layout, next(iter(live.values())).dtype)
    for name, view in views.items():
        live[name].data = view
    return views


def free_bytes(device: torch.device) -> int:
    """Returns the device's free bytes after releasing cached memory; 0 on CPU."""
    if device.type == "cpu":
        return 0
    # Garbage that the engine's start would free makes the engine look smaller, once by 9 GiB.
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
