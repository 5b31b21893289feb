"""Limit of open files for a rank, and the number that its process groups need. No torch.

A gloo group of n ranks needs n + 3 file descriptors on each rank: one per peer, one that listens,
and three of its thread. On CPU all groups use gloo. On GPUs only those of `World` and `Mesh` do,
and those that Megatron creates in addition to NCCL's. The usual soft limit of 1024 is a relic of
select(2), so it is raised to the administrator's hard limit.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence

from hybridrl.errors import UserError
from hybridrl.parallel.layout import TrainLayout

OTHERS = 64  # libraries, logs, pipes of reward processes


def raise_limit() -> None:
    """Raises the soft limit of open files to the hard one; child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_needed(world_size: int, layouts: Sequence[TrainLayout], is_cpu: bool) -> int:
    """Returns the number of descriptors that rank 0 needs; it also serves the job's store.

    Args:
        layouts: Layouts of the meshes, each over all ranks or some of them. A rank may be in all.
        is_cpu: Whether gloo also carries tensors.
    """
    groups = [world_size] * (
        2 if is_cpu else 1
    )  # torch's default group (CPU only) and that of `World`
    for layout in layouts:
        groups += _groups(layout, is_cpu)
        groups += [layout.world_size] if layout.world_size < world_size else []  # that of `Mesh`
    of_store = 2 * world_size  # each rank and its heartbeat connect to the store
    return sum(size + 3 for size in groups) + of_store + OTHERS


def _groups(layout: TrainLayout, is_cpu: bool) -> list[int]:
    """Returns the sizes of the gloo groups that megatron-core 0.16 creates for a layout."""
    tp, cp, dp, pp = layout.tp, layout.cp, layout.dp, layout.pp
    ep, etp, expert_dp = layout.ep, layout.etp, layout.edp
    in_addition = [dp, dp * cp, expert_dp]  # to NCCL's
    others = [layout.world_size, dp, dp * cp, expert_dp]
    others += [tp * dp, tp * dp * cp, tp * cp, tp, cp, pp, tp * pp]
    others += [min(pp, 2), 1, ep, etp, etp * ep, etp * ep * pp]  # embeddings; experts
    return in_addition + (others if is_cpu else [])


def shortage(world_size: int, layouts: Sequence[TrainLayout], is_cpu: bool) -> UserError | None:
    """Returns an error if the limit of open files is below `num_needed`, else None."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_needed(world_size, layouts, is_cpu)
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return None
    return UserError(
        "the limit of open files (ulimit -n)",
        hard,
        f"at least {needed} for {world_size} ranks",
        "Raise the hard limit where the ranks run (ulimit -Hn, limits.conf, LimitNOFILE= of the "
        "service, --ulimit nofile= of the container), or train with fewer ranks.",
    )
