"""Raises a rank's limit on open files, and computes how many its groups need. No torch.

A gloo group of n ranks needs n + 3 file descriptors on each rank: one per peer (n - 1), one to
listen, and three for its thread. On CPU, all groups use gloo. On GPUs, only the groups of `World`
and `Mesh` use gloo, and the gloo groups that Megatron creates in addition to its NCCL groups. The
usual soft limit of 1024 exists only for select(2), so it is raised to the hard limit that the
administrator has set.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence

from hybridrl.errors import UserError
from hybridrl.parallel.layout import TrainLayout

OTHERS = 64  # files of libraries, logs, and pipes to reward processes


def raise_limit() -> None:
    """Raises the soft limit on open files to the hard limit. Child processes inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_needed(world_size: int, layouts: Sequence[TrainLayout], is_cpu: bool) -> int:
    """Returns how many descriptors rank 0 needs, the most, because it also serves the store.

    Each mesh of `layouts` may contain all ranks or only some; a rank may be in all meshes.
    """
    # torch's default group (CPU only) and the group of `World`
    groups = [world_size] * (2 if is_cpu else 1)
    for layout in layouts:
        groups += _groups(layout, is_cpu)
        groups += [layout.world_size] if layout.world_size < world_size else []  # group of `Mesh`
    of_store = 2 * world_size  # each rank and its heartbeat thread connect to the store
    return sum(size + 3 for size in groups) + of_store + OTHERS


def _groups(layout: TrainLayout, is_cpu: bool) -> list[int]:
    """Returns the size of each gloo group that Megatron-Core creates; 0.16 lacks the last three."""
    tp, cp, dp, pp = layout.tp, layout.cp, layout.dp, layout.pp
    ep, etp, expert_dp = layout.ep, layout.etp, layout.edp
    in_addition = [dp, dp * cp, expert_dp]  # gloo groups in addition to the NCCL groups
    others = [layout.world_size, dp, dp * cp, expert_dp]
    others += [tp * dp, tp * dp * cp, tp * cp, tp, cp, pp, tp * pp]
    others += [min(pp, 2), 1, ep, etp, etp * ep, etp * ep * pp]  # groups for embeddings and experts
    others += [1, 1, etp * ep * pp]  # groups with generalised tensor parallelism, which is off
    return in_addition + (others if is_cpu else [])


def shortage(world_size: int, layouts: Sequence[TrainLayout], is_cpu: bool) -> UserError | None:
    """Returns an error if the hard limit on open files is below `num_needed`, else None."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_needed(world_size, layouts, is_cpu)
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return None
    return UserError(
        "the limit on open files (ulimit -n)",
        hard,
        f"at least {needed} for {world_size} ranks",
        "Raise the hard limit where the ranks run (ulimit -Hn, limits.conf, LimitNOFILE= of the "
        "service, --ulimit nofile= of the container), or train with fewer ranks.",
    )
