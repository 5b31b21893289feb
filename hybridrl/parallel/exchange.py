"""Moves token columns and blobs from the ranks that produced samples to the ranks that need them.

Every rank knows which ranks hold which samples, so senders and receivers need no communication.
Each rank that lacks a sample receives it once. Ranks that have the same sample share the work of
sending it. Columns stay on the host and are sent over gloo, because NCCL would need device memory
for each pair of ranks, and an engine leaves none free (docs/adr/0007-sample-exchange.md).

Who waits for whom: all ranks of the world call these functions in the same order, with the same
tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hybridrl.contracts.batch import Blob, RolloutBatch
from hybridrl.contracts.checks import columns_of
from hybridrl.contracts.holders import Holders, Ranks

Array = np.ndarray[Any, Any]
B = TypeVar("B", bound=RolloutBatch)


class Route:
    """Moves columns of samples from the ranks that have them to the ranks that want them.

    Args:
        lengths_B: Number of tokens in each sample.
        have_BW, want_BW: Whether each rank has, and wants, each sample's values, (B, W) bool. At
            least one rank must have each wanted sample.
        rows_H: Samples in this rank's columns, ascending; there may be more than in `have_BW`. If
            None, they are those in `have_BW`.
    """

    def __init__(
        self,
        lengths_B: Tensor,
        have_BW: Tensor,
        want_BW: Tensor,
        world: Ranks,
        rows_H: Tensor | None = None,
    ) -> None:
        self._world, self._lengths_B = world, lengths_B.numpy()
        have_B, want_B = have_BW[:, world.rank].numpy(), want_BW[:, world.rank].numpy()
        samples_P, receivers_P = (want_BW & ~have_BW).numpy().nonzero()
        senders_P = _senders(have_BW.numpy(), samples_P, receivers_P)
        self.moves = len(samples_P) > 0
        self._rows = np.flatnonzero(have_B) if rows_H is None else rows_H.numpy()
        self._kept = np.flatnonzero(have_B & want_B)
        self._sent = _in_order(samples_P, receivers_P, senders_P == world.rank)
        self._received = _in_order(samples_P, senders_P, receivers_P == world.rank)

    def __call__(self, column_T: Tensor, num_rows_B: Tensor | None = None) -> Tensor:
        """Returns the column for the samples that this rank wants, in sample order.

        `column_T` has values of this rank's samples, (T,) or (T, K), on the CPU: by default one
        row per token, or `num_rows_B` per sample.
        """
        rows_B = self._lengths_B if num_rows_B is None else num_rows_B.numpy()
        if not self.moves and len(self._kept) == len(self._rows):
            return column_T  # nothing moves and nothing is dropped
        parts = column_T.split(rows_B[self._rows].tolist())
        own = dict(zip(self._rows.tolist(), parts, strict=True))
        found = {sample: own[sample] for sample in self._kept.tolist()}
        if self.moves:
            sent, received = self._sent[0].tolist(), self._received[0].tolist()
            sent_T = _joined([own[sample] for sample in sent], column_T)
            sent_W = self._counts(self._sent, rows_B)
            received_W = self._counts(self._received, rows_B)
            arrived_T = column_T.new_empty(sum(received_W), *column_T.shape[1:])
            self._world.all_to_all(arrived_T, sent_T, received_W, sent_W)
            arrived = arrived_T.split(rows_B[received].tolist())
            found |= zip(received, arrived, strict=True)
        return _joined([found[sample] for sample in sorted(found)], column_T)

    def _counts(self, pairs: tuple[Array, Array], rows_B: Array) -> list[int]:
        samples, ranks = pairs
        counts_W = np.bincount(ranks, rows_B[samples], self._world.size)
        return [int(count) for count in counts_W]


def bring(batch: B, want_BW: Tensor, world: Ranks, num_parts: int = 1) -> B:
    """Returns the batch after moving the tokens of each sample to exactly the ranks that want them.

    Args:
        want_BW: Whether each rank wants each sample, (B, W) bool, at least one rank each.
        num_parts: See `Holders`.
    """
    wanted = Holders(want_BW, world, num_parts)
    have_BW = torch.ones_like(want_BW) if batch.holders is None else batch.holders.by_rank_BW
    route = Route(batch.lengths_B, have_BW, want_BW, world)
    declared = columns_of(type(batch))
    moved: dict[str, Any] = {}
    for name, value in batch.columns().items():
        if declared[name].per_token:
            moved[name] = _moved(route, value)
    if batch.observed_T is not None and batch.num_observed_B is None:
        moved["num_observed_B"] = batch.observed_lengths_B
    blobs = {
        name: Blob(_moved_rows(route, one), one.num_rows_B) for name, one in batch.blobs.items()
    }
    return replace(batch, holders=wanted, blobs=blobs, **moved)


def _moved(route: Route, column_T: Tensor) -> Tensor:
    """Moves a column along a route. Token ids are sent as 32-bit integers."""
    if route.moves and column_T.dtype == torch.int64:
        return route(column_T.int()).long()
    return route(column_T)


def _moved_rows(route: Route, blob: Blob) -> Tensor:
    """Moves a blob's values along a route as bytes, because gloo does not support every dtype."""
    values_N = blob.values_N
    if not route.moves:
        return route(values_N, blob.num_rows_B)
    flat_NK = values_N.flatten(1) if values_N.ndim > 1 else values_N[:, None]
    arrived_NK = route(flat_NK.contiguous().view(torch.uint8), blob.num_rows_B)
    arrived_NK = arrived_NK.view(values_N.dtype)
    return arrived_NK.reshape(len(arrived_NK), *values_N.shape[1:])


def collect(batch: B, world: Ranks, rank: int = 0) -> B | None:
    """Returns the whole batch on rank `rank`, and None on all other ranks."""
    if batch.holders is None:
        return batch if world.rank == rank else None
    want_BW = torch.zeros(batch.num_samples, world.size, dtype=torch.bool)
    want_BW[:, rank] = True
    found = bring(batch, want_BW, world)
    return replace(found, holders=None, num_observed_B=None) if world.rank == rank else None


def _senders(have_BW: Array, samples_P: Array, receivers_P: Array) -> Array:
    """Returns, for each pair of a sample and a receiver, the rank that sends the sample."""
    counts_B = have_BW.sum(1)
    if not (is_there_P := counts_B[samples_P] > 0).all():
        raise ValueError(f"no rank has the tokens of sample {samples_P[~is_there_P][0]}")
    starts_B = counts_B.cumsum() - counts_B
    holders = have_BW.nonzero()[1]  # ordered by sample
    found: Array = holders[starts_B[samples_P] + (samples_P + receivers_P) % counts_B[samples_P]]
    return found


def _in_order(samples_P: Array, ranks_P: Array, is_mine_P: Array) -> tuple[Array, Array]:
    samples, ranks = samples_P[is_mine_P], ranks_P[is_mine_P]
    order = np.lexsort((samples, ranks))
    return samples[order], ranks[order]


def _joined(rows: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat(list(rows)) if rows else like.new_empty(0, *like.shape[1:])
