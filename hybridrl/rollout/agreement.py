"""The check that all tensor-parallel ranks of a replica draw the same tokens.

Who waits for whom: `report` is called by every rank of the group after every step and starts one
gather of eight bytes a rank; the next `report`, or `settle`, waits for it. So the check costs no
time of its own, and a rank never starts another step, or finds itself done, on tokens that its
peers do not have.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist


class TokensDifferError(RuntimeError):
    """The ranks of one replica drew different tokens, so their caches no longer fit together."""


class TokenAgreement:
    """Compares what the ranks of one replica drew, a step later.

    Args:
        group: gloo group of the replica's ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks: list[int] = dist.get_process_group_ranks(group)
        self._work: dist.Work | None = None
        self._sums: list[torch.Tensor] = []
        self._step = 0

    @property
    def is_alone(self) -> bool:
        """Whether a rank is its replica, so that there is nothing to compare."""
        return len(self._ranks) == 1

    def report(self, drawn: Sequence[tuple[int, int]]) -> None:
        """Tells the other ranks what this one drew: (request id, token) in order."""
        if self.is_alone:
            return
        self.settle()
        self._step += 1
        own = torch.tensor([zlib.crc32(np.asarray(drawn, dtype=np.int64).tobytes())])
        self._sums = [torch.empty_like(own) for _ in self._ranks]
        self._work = dist.all_gather(self._sums, own, group=self._group, async_op=True)

    def settle(self) -> None:
        """Waits for the last report of all ranks.

        Raises:
            TokensDifferError: on all of them, naming those that differ.
        """
        if self._work is None:
            return
        self._work.wait()
        self._work = None
        sums = [int(one) for one in self._sums]
        differing = [rank for rank, one in zip(self._ranks, sums, strict=True) if one != sums[0]]
        if differing:
            raise TokensDifferError(
                f"in engine step {self._step} ranks {differing} drew other tokens than rank "
                f"{self._ranks[0]} of the same replica {self._ranks}: their weights, seeds or "
                "requests differ"
            )
