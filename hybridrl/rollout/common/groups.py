"""The ranks of a replica, as engines that lay their own grid over all ranks must be told them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from hybridrl.parallel.layout import RolloutLayout


def replica_members(layout: RolloutLayout, rank: int) -> list[int]:
    """Returns the global ranks of this rank's replica, in tensor-parallel order.

    Raises:
        ValueError: they do not ascend. torch sorts the ranks of a group, engines take the order
            that they were given for the tensor-parallel rank: they would generate wrong tokens,
            silently.
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
    """Returns a function that makes an engine's process groups over the ranks of a layout.

    Args:
        build: takes lists of ranks, first, as if the engines' ranks were numbered by their places.
        knows_replicas: whether the lists are those of all replicas; else they are those of one.
    """
    ranks, tp = ranks_by_place(layout), layout.tp
    starts = [0] if knows_replicas else range(0, len(ranks), tp)

    def build_over_layout(groups: list[list[int]], *args: Any, **kwargs: Any) -> Any:
        mapped = [[ranks[start + place] for place in group] for start in starts for group in groups]
        return build(mapped, *args, **kwargs)

    return build_over_layout
