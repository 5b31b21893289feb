"""What the ranks of an engine replica, and those of all engines, tell each other.

Who waits for whom: all ranks of a replica call `broadcast_object` or `is_any` together, and wait
for the others as long as they live: the first one may wait for a tool. Replicas are independent of
each other. All ranks with an engine call `EngineGroup.begin_sum` together, also while other threads
and ranks talk over the world. Making the groups is collective over the world.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.parallel.groups import UNBOUNDED
from hybridrl.parallel.heartbeat import Heartbeat
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.messages import broadcast_object
from hybridrl.parallel.watch import even


class ReplicaGroup:
    """The ranks that generate together.

    Args:
        layout: the replicas over all ranks.
        rank: this rank.
        heartbeat: of this rank; waits.
    """

    def __init__(self, layout: RolloutLayout, rank: int, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        place = layout.assignment[rank]
        self.is_first = place is not None and place[1] == 0
        self._group: dist.ProcessGroup | None = None
        if layout.tp == 1:
            return
        for replica in range(layout.replicas):
            ranks = [rank for rank in layout.ranks if layout.place(rank)[0] == replica]
            group = dist.new_group(ranks, timeout=UNBOUNDED, backend="gloo")
            if place is not None and replica == place[0]:
                self._group, self._ranks = group, even(ranks)
                self._source = layout.assignment.index((replica, 0))

    def broadcast_object(self, value: Any) -> Any:
        """Returns the first rank's `value` (picklable) on all ranks of the replica."""
        if self._group is None:
            return value

        def wait(work: dist.Work) -> None:
            self._wait(work, "what the first rank of a replica tells")

        return broadcast_object(value, self.is_first, self._source, self._group, wait)

    def is_any(self, value: bool) -> bool:
        """Returns whether `value` is true on any rank of the replica."""
        if self._group is None:
            return value
        flag = torch.tensor([int(value)])
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True)
        self._wait(work, "whether its ranks are asked to stop")
        return bool(flag)

    def _wait(self, work: dist.Work, what: str) -> None:
        self._heartbeat.wait(work, what, group="replica", ranks=self._ranks)


class EngineGroup:
    """The ranks of all engines, without those that have none.

    Args:
        layout: the replicas over all ranks.
        rank: this rank.
        heartbeat: of this rank; waits.
    """

    def __init__(self, layout: RolloutLayout, rank: int, heartbeat: Heartbeat) -> None:
        self._heartbeat, self._ranks = heartbeat, even(layout.ranks)
        self._group: dist.ProcessGroup | None = None
        if len(layout.ranks) > 1:
            group = dist.new_group(list(layout.ranks), timeout=UNBOUNDED, backend="gloo")
            self._group = group if rank in layout.ranks else None

    def begin_sum(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begins to add up `values`, on the CPU, over the ranks with an engine; returns what waits
        for the sum and returns it, or raises PeerError where a rank is lost or stays away.
        """
        total, what = values.clone(), "how far generation is"
        if self._group is None:
            return lambda: total
        work = dist.all_reduce(total, group=self._group, async_op=True)

        def wait() -> torch.Tensor:
            self._heartbeat.wait(work, what, group="engines", ranks=self._ranks)
            return total

        return wait
