"""Computes sums, maxima and the smallest candidates over the response tokens on all ranks.

Collective if each rank has the tokens of only some samples: all ranks call every method in the same
order. Each rank first reduces each of its samples, and then every rank reduces over all samples.
Results are therefore bitwise identical on all ranks and do not depend on how samples are
distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridrl.contracts.batch import RolloutBatch

NUM_MARKS = 256  # candidates that a rank sends first, to find out how many it must send
Array = np.ndarray[Any, Any]


class OverTokens:
    """Statistics over the `num` response tokens of a batch on all ranks.

    Arguments of shape (R,) have one value for each of the R response tokens on this rank.
    """

    def __init__(self, batch: RolloutBatch) -> None:
        self._batch = batch
        self.num = int(batch.response_lengths_B.sum())

    def sums(self, *values_R: Tensor) -> Tensor:
        """Returns the sums of K columns over each response: (B, K) float64."""
        return self._reduced(np.add, values_R)

    def largest(self, *values_R: Tensor) -> Tensor:
        """Returns the maxima of K columns over each response: (B, K) float64."""
        return self._reduced(np.maximum, values_R)

    def totals(self, *values_R: Tensor) -> Tensor:
        """Returns the sums of K columns over all tokens: (K,) float64."""
        return self.sums(*values_R).sum(0)

    def means(self, *values_R: Tensor) -> Tensor:
        """Returns the means of K columns over all tokens: (K,) float64."""
        return self.totals(*values_R) / self.num

    def _reduced(self, reduction: np.ufunc, values_R: tuple[Tensor, ...]) -> Tensor:
        lengths_H, batch = self._batch.response_lengths_H, self._batch
        found_HK = torch.zeros(len(lengths_H), len(values_R), dtype=torch.float64)
        if len(lengths_H):  # every response has at least one token
            starts = (lengths_H.cumsum(0) - lengths_H).numpy()
            for k, value_R in enumerate(values_R):
                # Five times as fast as torch's segment_reduce, with bitwise identical results.
                found_HK[:, k] = torch.from_numpy(
                    reduction.reduceat(value_R.double().numpy(), starts)
                )
        return batch.completed(found_HK)

    def are_first(self, index_N: Tensor, order_N: Tensor, key_N: Tensor, count: int) -> Tensor:
        """Returns which of this rank's candidates are among all ranks' `count` smallest: (N,).

        Candidates are indices into this rank's R response tokens, compared by `order_N` (float64),
        then by `key_N` (int64).
        """
        candidates = own = _Candidates(order_N.numpy(), key_N.numpy())
        if (holders := self._batch.holders) is not None:
            # If several ranks have the same sample, only one of them contributes its tokens.
            ends_H = self._batch.response_lengths_H.cumsum(0)
            speaks_N = holders.speaks_H[torch.searchsorted(ends_H, index_N, right=True)]
            own = candidates.at(speaks_N.numpy())
        own = own.first(count)
        if holders is not None and holders.ranks.size > 1:
            bound = _bound(holders.ranks.gather_objects(own.marks()), count)
            own = own.at(own.are_up_to(bound))
            own = _concatenated(holders.ranks.gather_objects(own)).first(count)
        if not len(own.order_N):
            return torch.zeros(len(index_N), dtype=torch.bool)
        return torch.from_numpy(candidates.are_up_to((own.order_N[-1], own.key_N[-1])))


class _Candidates(NamedTuple):
    """Sort keys of tokens. Marks also have the number of tokens that each represents."""

    order_N: Array
    key_N: Array
    counts_N: Array | None = None

    def at(self, which: Array) -> _Candidates:
        return _Candidates(*(column_N[which] for column_N in self if column_N is not None))

    def first(self, count: int) -> _Candidates:
        return self.at(np.lexsort((self.key_N, self.order_N))[:count])

    def are_up_to(self, bound: tuple[Any, Any]) -> Array:
        order, key = bound
        found: Array = (self.order_N < order) | ((self.order_N == order) & (self.key_N <= key))
        return found

    def marks(self) -> _Candidates:
        """Returns up to NUM_MARKS evenly spaced candidates, with numbers since the previous one."""
        ends = np.unique(np.linspace(0, len(self.order_N), NUM_MARKS + 1).astype(np.int64))[1:]
        return self.at(ends - 1)._replace(counts_N=np.diff(ends, prepend=0))


def _concatenated(parts: Sequence[_Candidates]) -> _Candidates:
    columns = zip(*parts, strict=True)
    return _Candidates(*(np.concatenate(column) for column in columns if column[0] is not None))


def _bound(marks: Sequence[_Candidates], count: int) -> tuple[Any, Any]:
    """Returns sort keys that at least `count` candidates of all ranks, or all, do not exceed."""
    found = _concatenated(marks)
    found = found.first(len(found.order_N))
    if found.counts_N is None or not len(found.counts_N):
        return 0.0, 0
    known = found.counts_N.cumsum()
    place = int(np.searchsorted(known, min(count, known[-1])))
    return found.order_N[place], found.key_N[place]
