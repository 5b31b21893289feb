"""How many files a rank may have open, and how many its process groups take. No torch.

A gloo group of n ranks takes n + 3 descriptors on each: a connection to every other, one to listen
on, and three of the thread that serves them. On CPU all groups are gloo's, on GPUs those that
Megatron makes beside NCCL's, and ours. The usual soft limit of 1024 is a relic of select(2); it is
raised to the hard one, which is what an administrator has set.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence

from hybridrl.errors import UserError
from hybridrl.parallel.layout import TrainLayout

OTHERS = 64  # libraries, logs, pipes of reward processes


def raise_limit() -> None:
    """Raises this process's soft limit of open files to the hard one; children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def num_needed(world_size: int, layouts: Sequence[TrainLayout], is_cpu: bool) -> int:
    """Returns how many descriptors a rank needs, on rank 0, which serves the job's store as well.

    Args:
        world_size: ranks of the job.
        layouts: of the meshes, over all of these ranks or some; a rank may be of every one.
        is_cpu: gloo carries tensors too.
    """
    groups = [world_size] * (2 if is_cpu else 1)  # of torch, of `World`
    for layout in layouts:
        groups += _groups(layout, is_cpu)
        groups += [layout.world_size] if layout.world_size < world_size else []  # of `Mesh`
    of_store = 2 * world_size  # every rank, and its heartbeat
    return sum(size + 3 for size in groups) + of_store + OTHERS


def _groups(layout: TrainLayout, is_cpu: bool) -> list[int]:
    """Returns the sizes of the gloo groups that megatron-core 0.16 makes of a layout."""
    tp, cp, dp, pp = layout.tp, layout.cp, layout.dp, layout.pp
    ep, etp, expert_dp = layout.ep, layout.etp, layout.edp
    beside_nccl = [dp, dp * cp, expert_dp]
    others = [layout.world_size, dp, dp * cp, expert_dp]
    others += [tp * dp, tp * dp * cp, tp * cp, tp, cp, pp, tp * pp]
    others += [min(pp, 2), 1, ep, etp, etp * ep, etp * ep * pp]  # embeddings; experts
    return beside_nccl + (others if is_cpu else [])


def shortage(world_size: int, layouts: Sequence[TrainLayout], is_cpu: bool) -> UserError | None:
    """Returns what is wrong if this process may not open as many files as it needs, else None;
    arguments as of `num_needed`.
    """
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
