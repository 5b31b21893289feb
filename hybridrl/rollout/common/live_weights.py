"""Checks an engine's live fused parameters against the weight table, and shares the trainer's.

Used by engines of packages whose parameters have the layout of `fused_layout`.
"""

from __future__ import annotations

import gc
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridrl.hybrid_engine.memory.alias import is_view, shared_views
from hybridrl.models.boxes import Shape
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import RankLayout
from hybridrl.rollout.common.scheme import check_parameters, check_placement
from hybridrl.rollout.engine import Holding

STACKS = ("w13_weight", "w2_weight")  # all experts of a rank: gate over up, and down


class Names(Protocol):
    """Translates a package's parameter name into that of `fused_layout`; returns None for a copy of
    other parameters, which the layout does not contain.
    """

    def __call__(self, name: str) -> str | None: ...


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


def check_live(
    model: torch.nn.Module,
    layout: RankLayout,
    shapes: dict[str, Shape],
    version: str,
    layout_name: Names,
) -> None:
    """Raises ModelError unless the layout describes a new module's parameters; overwrites their
    contents.
    """
    tensors = live_tensors(model, layout_name)
    load: Any = model.load_weights
    check_parameters(layout, tensors, version)
    check_placement(layout, tensors, shapes, load, version)


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


def still_shared(views: dict[str, Tensor], tensors: dict[str, Tensor]) -> frozenset[str]:
    """Returns the names of parameters that are still the trainer's. A layer that is repacked after
    loading gets its own memory.
    """
    return frozenset(name for name, one in tensors.items() if is_view(name, one, views))


def written_parameters(
    tensors: dict[str, Tensor], shared: frozenset[str], layout: RankLayout
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the parameters that an update writes completely, and those that it writes in part
    because they contain padding. Excludes the trainer's parameters.
    """
    padded = {name for name, _ in layout.padding}
    own = [(name, one) for name, one in tensors.items() if name not in shared]
    return [t for name, t in own if name not in padded], [t for name, t in own if name in padded]


def weight_holdings(
    tensors: dict[str, Tensor], shared: frozenset[str], stays: bool
) -> dict[str, Holding]:
    """Returns the memory of parameters, with the trainer's parameters as a separate entry."""
    sizes = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    num_shared = sum(sizes[name] for name in shared)
    return {
        "weights": Holding(sum(sizes.values()) - num_shared, stays),
        "weights shared with the trainer": Holding(num_shared, is_shared=True),
    }


def layout_bytes(layout: RankLayout, dtype: str) -> int:
    """Returns the bytes of a rank's parameters in this dtype, e.g. "bfloat16"."""
    itemsize: int = getattr(torch, dtype).itemsize
    return sum(prod(size) for size in layout.shapes.values()) * itemsize


def free_bytes(device: torch.device) -> int:
    """Returns the device's free bytes after releasing cached memory; 0 on CPU."""
    if device.type == "cpu":
        return 0
    # Garbage that the engine's start would free makes the engine look smaller, once by 9 GiB.
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]
