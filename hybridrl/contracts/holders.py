"""Records which ranks have the tokens of each sample, and completes per-sample values collectively.

Every rank has the per-sample columns of a whole step, but the token columns of only some samples. A
value that depends on tokens is computed on a rank that has these tokens, and sent to all ranks. The
result is bitwise identical for every assignment of samples to ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor


class Ranks(Protocol):
    """All ranks of the job (`parallel.groups.World`): collective calls on the host."""

    rank: int
    size: int

    def sum_on_host(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` over all ranks."""

    def all_to_all(
        self, received: Tensor, sent: Tensor, received_W: Sequence[int], sent_W: Sequence[int]
    ) -> None:
        """Fills `received` with the values that the ranks send to this rank, in rank order."""

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's `value`, in rank order."""


@dataclass(frozen=True, eq=False)
class Holders:
    """Ranks that have the tokens of each of B samples: by_rank_BW, (B, W) bool, at least one each.

    `num_parts` is the number of optimizer steps among which the samples are divided. The replica
    that trains on a sample has its tokens.
    """

    by_rank_BW: Tensor
    ranks: Ranks
    num_parts: int = 1

    @cached_property
    def rows_H(self) -> Tensor:
        """Indices of the samples whose tokens are on this rank, in ascending order: (H,) int64."""
        return self.by_rank_BW[:, self.ranks.rank].nonzero()[:, 0]

    @cached_property
    def speaks_H(self) -> Tensor:
        """Whether this rank is the first rank that has the tokens of each sample: (H,) bool."""
        return self.by_rank_BW[self.rows_H].int().argmax(1) == self.ranks.rank

    def select(self, index_B: Tensor) -> Self:
        return replace(self, by_rank_BW=self.by_rank_BW[index_B], num_parts=1)

    @staticmethod
    def concat(parts: Sequence[Holders]) -> Holders:
        by_rank_BW = torch.cat([part.by_rank_BW for part in parts])
        return replace(parts[0], by_rank_BW=by_rank_BW, num_parts=1)

    def completed(self, value_H: Tensor) -> Tensor:
        """Returns values for all samples from this rank's (H,) or (H, K) floats. Collective."""
        if self.ranks.size == 1:
            return value_H
        value_B = torch.zeros(len(self.by_rank_BW), *value_H.shape[1:], dtype=value_H.dtype)
        value_B[self.rows_H[self.speaks_H]] = value_H[self.speaks_H]
        return self.ranks.sum_on_host(value_B)  # other ranks contribute zeros
