"""Builds packages' process groups over the ranks that a layout assigns to replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.view import View
from hybridrl.rollout.common.process_state import replaced


def replica_members(layout: RolloutLayout, rank: int) -> list[int]:
    """Returns the global ranks of this rank's replica, in tensor-parallel order.

    Raises ValueError if they do not ascend. torch sorts a group's ranks but engines do not, so an
    engine would silently generate wrong tokens.
    """
    replica, _ = layout.place(rank)
    places = {other: layout.place(other) for other in layout.ranks}
    by_tp_rank = {tp: other for other, (which, tp) in places.items() if which == replica}
    members = [by_tp_rank[tp] for tp in range(layout.tp)]
    if members != sorted(members):
        raise ValueError(
            f"rollout assignment: replica {replica} has ranks {members} in tensor-parallel order; "
            "they must ascend. Change the order of the training axes (train layout)."
        )
    return members


def ranks_by_place(layout: RolloutLayout) -> list[int]:
    """Returns the rank at each position in the grid (replicas, tensor parallel)."""
    rank_of = {layout.place(rank): rank for rank in layout.ranks}
    return [rank_of[place] for place in product(range(layout.replicas), range(layout.tp))]


def over_layout(
    layout: RolloutLayout, build: Callable[..., Any], knows_replicas: bool
) -> Callable[..., Any]:
    """Returns a function that calls `build` with an engine's groups, translated to a layout's
    ranks. Positions in groups cover all replicas if `knows_replicas`, otherwise one replica.
    """
    ranks, tp = ranks_by_place(layout), layout.tp
    starts = [0] if knows_replicas else range(0, len(ranks), tp)

    def build_over_layout(groups: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        mapped = [[ranks[start + place] for place in group] for start in starts for group in groups]
        return build(mapped, *args, **kwargs)

    return build_over_layout


@contextlib.contextmanager
def engine_world(
    parallel_state: Any, size: int, build_group: Callable[..., Any], build_world: Callable[..., Any]
) -> Iterator[None]:
    """Makes a package build its groups with these functions, as if the job had `size` ranks."""
    distributed, torch_view = View(dist), View(torch)
    distributed.get_world_size = lambda group=None: (
        size if group is None else dist.get_world_size(group)
    )
    torch_view.distributed = distributed
    with (
        replaced(parallel_state, "init_model_parallel_group", build_group),
        replaced(parallel_state, "init_world_group", build_world),
        replaced(parallel_state, "torch", torch_view),
    ):
        yield


def check_groups(
    package: str, parallel_state: Any, open_engines: list[Any], rank: int, members: list[int]
) -> None:
    """Raises RuntimeError if a package, which keeps its groups until the process ends, has groups
    for other ranks. If their default group was destroyed, removes them and clears `open_engines`,
    the engines that were not stopped.
    """
    world = parallel_state._WORLD
    if world is None:
        return
    try:
        dist.get_process_group_ranks(world.cpu_group)
    except KeyError:  # these groups were destroyed with the default group
        for name, value in vars(parallel_state).items():
            if isinstance(value, parallel_state.GroupCoordinator):
                setattr(parallel_state, name, None)
        open_engines.clear()
    if not parallel_state.model_parallel_is_initialized():
        return
    found = list(parallel_state._TP.ranks)
    if found != members:
        raise RuntimeError(
            f"rank {rank}: this process has an open {package} engine for ranks {found}; the layout "
            f"needs ranks {members}. Close the first engine."
        )


def end_groups(parallel_state: Any) -> None:
    """Destroys a package's groups; its own shutdown would destroy the default group too."""
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None


def least_free_memory(layout: RolloutLayout) -> tuple[int, int]:
    """Returns the minimum free bytes over all engines' GPUs, and this GPU's total bytes."""
    free, total = torch.cuda.mem_get_info()
    found: list[int] = [0] * len(layout.ranks)
    group = dist.new_group(list(layout.ranks), backend="gloo")
    dist.all_gather_object(found, free, group)
    dist.destroy_process_group(group)
    return min(found), total
