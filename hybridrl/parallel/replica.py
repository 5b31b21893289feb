"""What the first rank of an engine replica tells the others.

Who waits for whom: all ranks of a replica call `tell` together, and wait for its first one.
Replicas are independent of each other; making the groups is collective over the world.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist

from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.messages import pack, unpack


class ReplicaGroup:
    """The ranks that generate together.

    Args:
        layout: the replicas over all ranks.
        rank: this rank.
        timeout_s: longest that `tell` waits (`run.collective_timeout_s`), seconds.
    """

    def __init__(self, layout: RolloutLayout, rank: int, timeout_s: float = 600.0) -> None:
        self._replica, tp_rank = layout.assignment[rank]
        self.is_first = tp_rank == 0
        self._group: dist.ProcessGroup | None = None
        if layout.tp == 1:
            return
        for replica in range(layout.replicas):
            ranks = [r for r, (number, _) in enumerate(layout.assignment) if number == replica]
            timeout = datetime.timedelta(seconds=timeout_s)
            group = dist.new_group(ranks, timeout=timeout, backend="gloo")
            if replica == self._replica:
                self._group = group
                self._source = layout.assignment.index((replica, 0))

    def tell(self, value: Any) -> Any:
        """Returns the first rank's `value` (picklable, not None) on all ranks of the replica."""
        if self._group is None:
            return value
        packed = pack(value if self.is_first else None)
        size = torch.tensor([len(packed)])
        dist.broadcast(size, self._source, self._group)
        if not self.is_first:
            packed = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(packed, self._source, self._group)
        return unpack(packed)
