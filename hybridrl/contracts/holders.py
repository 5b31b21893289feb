"""Which ranks have the tokens of which samples, and how ranks complete what each knows of its own.

Every rank knows the per-sample columns of a whole step: numbers, groups, lengths, rewards. Token
columns are of some samples on each rank (parallel/exchange.py moves them). What follows from tokens
is computed a sample, by a rank that has it, and completed to all samples: it is the same, bit for
bit, however the samples are dealt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Ranks(Protocol):
    """All ranks of the job, as `parallel.groups.World` has them; calls are collective, on the host,
    and wait for a slow rank.
    """

    rank: int
    size: int

    def sum_on_host(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` over all ranks."""
        ...

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_W: Sequence[int], sent_W: Sequence[int]
    ) -> None:
        """Fills `received` with what each rank sends to this one, rank after rank."""
        ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's `value`, in rank order."""
        ...


@dataclass(frozen=True, eq=False)
class Holders:
    """Which ranks have the tokens of which of B samples.

    Args:
        by_rank_BW: (B, W) bool, of each sample and each of the W ranks, whether it has the tokens;
            some rank has those of each sample.
        ranks: how they talk.
        num_parts: optimizer steps that the samples are to be trained on in; their tokens lie with
            the replica that trains on them in its own.
    """

    by_rank_BW: Tensor
    ranks: Ranks
    num_parts: int = 1

    @cached_property
    def rows_H(self) -> Tensor:
        """The samples whose tokens are on this rank, ascending: (H,) int64."""
        return self.by_rank_BW[:, self.ranks.rank].nonzero()[:, 0]

    @cached_property
    def speaks_H(self) -> Tensor:
        """Of these, for which this rank speaks, the first one that has them: (H,) bool."""
        return self.by_rank_BW[self.rows_H].int().argmax(1) == self.ranks.rank

    def select(self, index_B: Tensor) -> Self:
        """Returns the holders of these samples, in this order."""
        return replace(self, by_rank_BW=self.by_rank_BW[index_B], num_parts=1)

    @staticmethod
    def concat(parts: Sequence[Holders]) -> Holders:
        """Returns the holders of the samples of all parts, one after the other."""
        by_rank_BW = torch.cat([part.by_rank_BW for part in parts])
        return replace(parts[0], by_rank_BW=by_rank_BW, num_parts=1)

    def completed(self, value_H: Tensor) -> Tensor:
        """Returns the values of all samples, of those that each rank has for its own; collective.

        Args:
            value_H: (H,) or (H, K) floats.
        """
        if self.ranks.size == 1:
            return value_H
        value_B = torch.zeros(len(self.by_rank_BW), *value_H.shape[1:], dtype=value_H.dtype)
        value_B[self.rows_H[self.speaks_H]] = value_H[self.speaks_H]
        return self.ranks.sum_on_host(value_B)  # all others are zero
