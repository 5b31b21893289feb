"""Process groups of packages' engines: built over the ranks that a layout gives a replica."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.parallel.layout import RolloutLayout


def replica_members(layout: RolloutLayout, rank: int) -> list[int]:
    """Returns the global ranks of this rank's replica, in tensor-parallel order.

    Raises:
        ValueError: They do not ascend. torch sorts the ranks of a group and engines do not: they
            would generate wrong tokens, silently.
    """
    replica, _ = layout.place(rank)
    places = {other: layout.place(other) for other in layout.ranks}
    by_tp_rank = {tp: other for other, (which, tp) in places.items() if which == replica}
    members = [by_tp_rank[tp] for tp in range(layout.tp)]
    if members != sorted(members):
        raise ValueError(
            f"rollout assignment: replica {replica} has ranks {members} in tensor-parallel order; "
            "they must ascend. Change the order of the training axes instead (train layout)."
        )
    return members


def ranks_by_place(layout: RolloutLayout) -> list[int]:
    """Returns the rank at each place of the grid (replicas, tensor parallel)."""
    rank_of = {layout.place(rank): rank for rank in layout.ranks}
    return [rank_of[place] for place in product(range(layout.replicas), range(layout.tp))]


def over_layout(
    layout: RolloutLayout, build: Callable[..., Any], knows_replicas: bool
) -> Callable[..., Any]:
    """Returns a function that makes an engine's process groups over the ranks of a layout. `build`
    takes lists of ranks as if they were numbered by their places: of all replicas if it
    `knows_replicas`, else of one.
    """
    ranks, tp = ranks_by_place(layout), layout.tp
    starts = [0] if knows_replicas else range(0, len(ranks), tp)

    def build_over_layout(groups: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        mapped = [[ranks[start + place] for place in group] for start in starts for group in groups]
        return build(mapped, *args, **kwargs)

    return build_over_layout


def check_groups(
    package: str, parallel_state: Any, open_engines: list[Any], rank: int, members: list[int]
) -> None:
    """Refuses groups of a package that are not the layout's; forgets those of an ended world.

    A package keeps its groups, in `parallel_state`, for the life of the process. `open_engines`,
    those that are not stopped, is emptied with an ended world.
    """
    world = parallel_state._WORLD
    if world is None:
        return
    try:
        dist.get_process_group_ranks(world.cpu_group)
    except KeyError:  # destroyed together with the default group that it was made in
        for name, value in vars(parallel_state).items():
            if isinstance(value, parallel_state.GroupCoordinator):
                setattr(parallel_state, name, None)
        open_engines.clear()
    if not parallel_state.model_parallel_is_initialized():
        return
    found = list(parallel_state.get_tp_group().ranks)
    if found != members:
        raise RuntimeError(
            f"rank {rank}: {package} has the replica {found} open in this process, and the layout "
            f"asks for {members}: close the first engine"
        )


def end_groups(parallel_state: Any) -> None:
    """Ends a package's groups; its own shutdown destroys the default group too, the trainer's."""
    parallel_state.destroy_model_parallel()
    if parallel_state._WORLD is not None:
        parallel_state._WORLD.destroy()
        parallel_state._WORLD = None


def least_free_memory(layout: RolloutLayout) -> tuple[int, int]:
    """Returns the bytes that every engine's GPU has free at least, and those of this GPU."""
    free, total = torch.cuda.mem_get_info()
    found: list[int] = [0] * len(layout.ranks)
    group = dist.new_group(list(layout.ranks), backend="gloo")
    dist.all_gather_object(found, free, group)
    dist.destroy_process_group(group)
    return min(found), total
