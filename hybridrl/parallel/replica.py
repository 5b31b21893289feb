"""Communication among the ranks of an engine replica, and among all ranks that have an engine.

Who waits for whom: all ranks of a replica call `broadcast_object` or `is_any` together, and wait
for each other as long as they are alive, because the first rank may be waiting for a tool. Replicas
do not wait for each other. All ranks with an engine call `EngineGroup.begin_sum` together; other
threads and ranks may communicate over the world at the same time. Creating the groups is collective
over the world.
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
    """Communication among the ranks of this rank's engine replica.

    Attributes:
        number: Number of the replica; None if this rank has no engine.
        is_first: Whether this rank is the first of its replica.
    """

    def __init__(self, layout: RolloutLayout, rank: int, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        place = layout.assignment[rank]
        self.number = None if place is None else place[0]
        self.num_replicas, self.num_ranks = layout.replicas, layout.tp
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
        """Returns the (picklable) `value` of the first rank on all ranks of the replica."""
        if self._group is None:
            return value

        def wait(work: dist.Work) -> None:
            self._wait(work, "a broadcast in an engine replica")

        return broadcast_object(value, self.is_first, self._source, self._group, wait)

    def is_any(self, value: bool) -> bool:
        """Whether `value` is true on any rank of the replica."""
        if self._group is None:
            return value
        flag = torch.tensor([int(value)])
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, self._group, async_op=True)
        self._wait(work, "a check for stop requests in an engine replica")
        return bool(flag)

    def _wait(self, work: dist.Work, what: str) -> None:
        self._heartbeat.wait(work, what, group="replica", ranks=self._ranks)


class EngineGroup:
    """Communication among the ranks that have an engine, in the layout of all replicas."""

    def __init__(self, layout: RolloutLayout, rank: int, heartbeat: Heartbeat) -> None:
        self._heartbeat, self._ranks = heartbeat, even(layout.ranks)
        self._group: dist.ProcessGroup | None = None
        if len(layout.ranks) > 1:
            group = dist.new_group(list(layout.ranks), timeout=UNBOUNDED, backend="gloo")
            self._group = group if rank in layout.ranks else None

    def begin_sum(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts summing `values`, on the CPU, over all ranks with an engine.

        Returns a function that waits for the sum; PeerError if a rank is lost or does not arrive.
        """
        total, what = values.clone(), "a sum of generation progress"
        if self._group is None:
            return lambda: total
        work = dist.all_reduce(total, group=self._group, async_op=True)

        def wait() -> torch.Tensor:
            self._heartbeat.wait(work, what, group="engines", ranks=self._ranks)
            return total

        return wait
