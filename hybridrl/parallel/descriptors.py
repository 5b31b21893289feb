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


def num_needed(layouts: Sequence[TrainLayout], is_cpu: bool) -> int:
    """Returns how many descriptors a rank needs, on rank 0, which serves the job's store as well.

    Args:
        layouts: that have groups; of the first, the largest, all ranks of the world are part.
        is_cpu: gloo carries tensors too.
    """
    world_size = layouts[0].world_size
    of_store = 2 * world_size  # every rank, and its heartbeat
    return sum(_of_groups(layout, is_cpu) for layout in layouts) + of_store + OTHERS


def _of_groups(layout: TrainLayout, is_cpu: bool) -> int:
    """Returns the descriptors of a layout's groups, those of megatron-core 0.16 and of `World`."""
    tp, cp, dp, pp = layout.tp, layout.cp, layout.dp, layout.pp
    ep, etp, expert_dp = layout.ep, layout.etp, layout.edp
    gloo_beside_nccl = [layout.world_size, dp, dp * cp, expert_dp]
    others = [layout.world_size, layout.world_size, dp, dp * cp, expert_dp]
    others += [tp * dp, tp * dp * cp, tp * cp, tp, cp, pp, tp * pp]
    others += [min(pp, 2), 1, ep, etp, etp * ep, etp * ep * pp]  # embeddings; experts
    groups = gloo_beside_nccl + (others if is_cpu else [])
    return sum(size + 3 for size in groups)


def shortage(layouts: Sequence[TrainLayout], is_cpu: bool) -> UserError | None:
    """Returns what is wrong if this process may not open as many files as it needs, else None;
    arguments as of `num_needed`.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_needed(layouts, is_cpu)
    if hard == resource.RLIM_INFINITY or needed <= hard:
        return None
    return UserError(
        "the limit of open files (ulimit -n)",
        hard,
        f"at least {needed} for {layouts[0].world_size} ranks",
        "Raise the hard limit where the ranks run (ulimit -Hn, limits.conf, LimitNOFILE= of the "
        "service, --ulimit nofile= of the container), or train with fewer ranks.",
    )
