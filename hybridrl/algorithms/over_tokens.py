"""Sums and extremes over all response tokens of a batch, of which each rank has some samples'.

Each is taken a sample first, by a rank that has its tokens, and then over the samples on every
rank: so it is the same on all ranks, and the same bit for bit however samples are dealt to them.
Collective where ranks have the tokens of some samples only.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hybridrl.contracts.batch import RolloutBatch


class OverTokens:
    """The response tokens of a batch; R are those on this rank.

    Args:
        batch: whose.
    """

    def __init__(self, batch: RolloutBatch) -> None:
        self._batch = batch
        self.num = int(batch.response_lengths_B.sum())

    def sums(self, *values_R: Tensor) -> Tensor:
        """Returns the sums of K values over each response: (B, K) float64."""
        return self._reduced("sum", values_R)

    def largest(self, *values_R: Tensor) -> Tensor:
        """Returns the largest of each of K values in each response: (B, K) float64."""
        return self._reduced("max", values_R)

    def totals(self, *values_R: Tensor) -> Tensor:
        """Returns the sums of K values over all tokens: (K,) float64."""
        return self.sums(*values_R).sum(0)

    def means(self, *values_R: Tensor) -> Tensor:
        """Returns the means of K values over all tokens: (K,) float64."""
        return self.totals(*values_R) / self.num

    def _reduced(self, how: Literal["sum", "max"], values_R: tuple[Tensor, ...]) -> Tensor:
        lengths_H, batch = self._batch.response_lengths_H, self._batch
        found = [
            torch.segment_reduce(value_R.double(), how, lengths=lengths_H, unsafe=True)
            for value_R in values_R
        ]
        return batch.completed(torch.stack(found, 1))

    def are_first(self, index_N: Tensor, order_N: Tensor, key_N: Tensor, count: int) -> Tensor:
        """Returns which of these tokens are among the `count` first of those that all ranks name,
        by order and then by key: (N,) bool.

        Args:
            index_N: of this rank's R tokens.
            order_N, key_N: smaller ones come first; float64 and int64.
            count: 1 or more.
        """
        named = _Named(order_N.numpy(), key_N.numpy())
        own = named
        if (holders := self._batch.holders) is not None:
            # Of a sample that several ranks have, one of them names the tokens.
            ends_H = self._batch.response_lengths_H.cumsum(0)
            speaks_N = holders.speaks_H[torch.searchsorted(ends_H, index_N, right=True)]
            own = named.at(speaks_N.numpy())
        own = own.first(count)
        if holders is not None:
            parts = holders.ranks.gather_objects((own.order_N, own.key_N))
            own = _Named(*(np.concatenate(column) for column in zip(*parts, strict=True)))
            own = own.first(count)
        if not len(own.order_N):
            return torch.zeros(len(index_N), dtype=torch.bool)
        order, key = own.order_N[-1], own.key_N[-1]
        is_tied_N = (named.order_N == order) & (named.key_N <= key)
        return torch.from_numpy((named.order_N < order) | is_tied_N)


class _Named:
    """Tokens by what they are ordered by."""

    def __init__(self, order_N: np.ndarray, key_N: np.ndarray) -> None:  # type: ignore[type-arg]
        self.order_N, self.key_N = order_N, key_N

    def at(self, which: np.ndarray) -> _Named:  # type: ignore[type-arg]
        return _Named(self.order_N[which], self.key_N[which])

    def first(self, count: int) -> _Named:
        """Returns the `count` first, in order."""
        return self.at(np.lexsort((self.key_N, self.order_N))[:count])
