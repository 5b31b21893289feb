"""Between a batch's token alignment and a micro-batch's predictor alignment, both ways.

Owns the shift by one: what a batch says about token t of a sample, a micro-batch holds at the
position of token t - 1. Nothing else in hybridrl shifts. Runs on the CPU; `MicroBatch.to` moves
the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrl.batch import MicroBatch, RolloutBatch
from hybridrl.data.packing import packed_bounds

_COLUMNS = (
    "old_logp",
    "reference_logp",
    "behaviour_logp",
    "advantages",
    "returns",
    "values",
)


def micro_batch(
    batch: RolloutBatch, indices: Sequence[int], pad_each: int, pad_total: int
) -> MicroBatch:
    """Packs samples of a batch one after the other.

    Args:
        batch: of any stage; columns that it does not carry are None.
        indices: the samples, in order of packing; none gives a micro-batch of padding only.
        pad_each: each sample is padded to a multiple of this (2 cp when cp > 1, else 1).
        pad_total: and the whole to a multiple of this (tp x 2 cp), by a trailing sequence.
    """
    index_B = torch.tensor(list(indices), dtype=torch.int64)
    bounds = packed_bounds(batch.lengths_B[index_B].tolist(), pad_each, pad_total)
    source_N, place_N, sample_N = _token_places(batch, index_B, bounds.starts)
    cu_seqlens = torch.tensor(bounds.cu_seqlens, dtype=torch.int32)
    tokens_S = torch.zeros(bounds.total, dtype=torch.int64)
    tokens_S[place_N] = batch.tokens_T[source_N]
    sequence_index_S = torch.full((bounds.total,), -1)
    sequence_index_S[place_N] = sample_N
    starts_S = torch.repeat_interleave(cu_seqlens[:-1].long(), cu_seqlens.diff().long())
    # Within padding the "next" token is padding, 0, as is the target that stands for none.
    has_next_S = torch.zeros(bounds.total, dtype=torch.bool)
    has_next_S[:-1] = sequence_index_S[:-1] == sequence_index_S[1:]
    response_N = batch.response_mask_T[source_N]
    source_R, predictor_R = source_N[response_N], place_N[response_N] - 1
    loss_mask_S = torch.zeros(bounds.total, dtype=torch.bool)
    loss_mask_S[predictor_R] = True
    carried = batch.columns()
    columns: dict[str, Tensor | None] = {}
    for name in _COLUMNS:
        column_T = carried.get(f"{name}_T")
        columns[f"{name}_S"] = None
        if column_T is not None:
            column_S = torch.zeros(bounds.total)
            column_S[predictor_R] = column_T[source_R]
            columns[f"{name}_S"] = column_S
    return MicroBatch(
        tokens_S=tokens_S,
        positions_S=torch.arange(bounds.total) - starts_S,
        targets_S=tokens_S.roll(-1) * has_next_S,
        loss_mask_S=loss_mask_S,
        sequence_index_S=sequence_index_S,
        cu_seqlens=cu_seqlens,
        max_seqlen=bounds.max_seqlen,
        sample_indices=tuple(index_B.tolist()),
        **columns,
    )


def unpack(micros: Sequence[MicroBatch], columns: Sequence[Tensor], batch: RolloutBatch) -> Tensor:
    """Puts per-position results back into one token-aligned column.

    Args:
        micros: whole micro-batches of `batch`, as `micro_batch` made them.
        columns: for each of them a predictor-aligned tensor (S,), on any device; what stands
            outside `loss_mask_S` is ignored.
        batch: where the samples come from.

    Returns:
        (T,) float32 on the CPU, zero on prompt tokens and on samples that no micro-batch holds, so
        that the sum over data-parallel ranks is the column of the whole batch.
    """
    column_T = torch.zeros(batch.num_tokens)
    for micro, column_S in zip(micros, columns, strict=True):
        if column_S.shape != micro.loss_mask_S.shape:
            raise ValueError(f"{tuple(column_S.shape)} results for {micro.num_positions} positions")
        index_B = torch.tensor(micro.sample_indices, dtype=torch.int64)
        # Sync point: the batch lives on the CPU, once a step and column.
        found_S = column_S.detach().to("cpu", torch.float32)
        source_N = _token_places(batch, index_B, (0,) * len(index_B))[0]
        response_N = batch.response_mask_T[source_N]
        column_T[source_N[response_N]] = found_S[micro.loss_mask_S.to("cpu")]
    return column_T


def _token_places(
    batch: RolloutBatch, index_B: Tensor, starts: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, for the N tokens of these samples, index in the batch, position and sample."""
    lengths_B = batch.lengths_B[index_B]
    sample_N = torch.repeat_interleave(lengths_B)
    within_N = torch.arange(len(sample_N)) - (lengths_B.cumsum(0) - lengths_B)[sample_N]
    starts_B = torch.tensor(starts, dtype=torch.int64)
    return (batch.offsets[index_B][sample_N] + within_N, starts_B[sample_N] + within_N, sample_N)
