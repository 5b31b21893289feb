"""Converts between the alignment of a batch (by token) and of a micro-batch (by predicting token).

No other module shifts values by one token: in a micro-batch, values about token t of a sample are
stored at the position of token t - 1. There are two exceptions: blobs are stored at their token's
own position, and so are all columns for a reward model that reads its score at the token itself
(`at_own_token`). Runs on the CPU; `MicroBatch.to` moves the result to a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from hybridrl.contracts.batch import MicroBatch, RolloutBatch
from hybridrl.contracts.blobs import KINDS
from hybridrl.contracts.micro_batch import LOSS_COLUMNS, ModelTensor
from hybridrl.contracts.ragged import row_places, starts_of
from hybridrl.models.inputs import ExtraInputs
from hybridrl.training.batches.branches import Branches
from hybridrl.training.batches.packing import packed_bounds
from hybridrl.training.batches.prompt_sharing import shared_prefix


def micro_batch(
    batch: RolloutBatch,
    indices: Sequence[int],
    pad_each: int,
    pad_total: int,
    shares_prompts: bool = False,
    at_own_token: bool = False,
    positions: ExtraInputs | None = None,
    branches: Branches | None = None,
) -> MicroBatch:
    """Packs samples of a batch one after another into a micro-batch.

    Args:
        batch: Batch from any stage of a step; columns that the batch lacks become None.
        indices: Indices of samples in packing order; if empty, the micro-batch contains only
            padding.
        pad_each: Each sample is padded to a multiple of this (2 cp if cp > 1, else 1).
        pad_total: A trailing sequence of padding fills the micro-batch up to a multiple of this (tp
            x 2 cp).
        positions: Source of positions if each token has several position numbers; None if each
            token has one.
    """
    index_B = torch.tensor(list(indices), dtype=torch.int64)
    among = None if branches is None else branches.of_rows(index_B.tolist())
    laid = _lay_out(batch, index_B, pad_each, pad_total, shares_prompts, among)
    source_N, place_N, total = laid.source_N, laid.place_N, len(laid.positions_S)
    tokens_S = torch.zeros(total, dtype=torch.int64)
    tokens_S[place_N] = batch.tokens_T[source_N]
    sequence_index_S = torch.full((total,), -1)
    sequence_index_S[place_N] = laid.sample_N
    # Padding tokens are 0; positions without a next token also have target 0.
    has_next_S = torch.zeros(total, dtype=torch.bool)
    has_next_S[:-1] = sequence_index_S[:-1] == sequence_index_S[1:]
    response_N = batch.response_mask_T[source_N]
    shift = 0 if at_own_token else 1
    source_R, place_R = source_N[response_N], place_N[response_N] - shift
    loss_mask_S = torch.zeros(total, dtype=torch.bool)
    loss_mask_S[place_R] = True
    carried = batch.columns()
    columns: dict[str, Tensor | None] = {}
    for name in LOSS_COLUMNS:
        column_T, columns[name] = carried.get(name.replace("_S", "_T")), None
        if column_T is not None:
            column_S = torch.zeros(total, *column_T.shape[1:], dtype=column_T.dtype)
            column_S[place_R] = column_T[source_R]
            columns[name] = column_S
    return MicroBatch(
        tokens_S=tokens_S,
        positions_S=laid.positions_S,
        targets_S=tokens_S.roll(-1) * has_next_S,
        loss_mask_S=loss_mask_S,
        sequence_index_S=sequence_index_S,
        cu_seqlens=laid.cu_seqlens,
        max_seqlen=laid.max_seqlen,
        sample_indices=tuple(index_B.tolist()),
        prefix_sequences=laid.prefix_sequences,
        position_rows_SR=_position_rows(batch, index_B, laid, positions),
        model_inputs=_packed_blobs(batch, index_B, laid),
        **columns,
    )


def _position_rows(
    batch: RolloutBatch, index_B: Tensor, laid: _Layout, positions: ExtraInputs | None
) -> Tensor | None:
    if positions is None:
        return None
    lengths_B = batch.lengths_B[index_B]
    rows_NR = torch.zeros(int(lengths_B.sum()), positions.num_position_rows, dtype=torch.int64)
    parts = rows_NR.split(lengths_B.tolist())
    for index, part in zip(index_B.tolist(), parts, strict=True):
        part[:] = positions.positions(batch, index, len(part))
    first_N = (lengths_B.cumsum(0) - lengths_B)[laid.sample_N]
    rows_SR = torch.zeros(len(laid.positions_S), rows_NR.shape[1], dtype=torch.int64)
    rows_SR[laid.place_N] = rows_NR[first_N + laid.within_N]
    return rows_SR


def _packed_blobs(batch: RolloutBatch, index_B: Tensor, laid: _Layout) -> dict[str, ModelTensor]:
    found: dict[str, ModelTensor] = {}
    places, total = batch.places_of(index_B), len(laid.positions_S)
    for name, blob in batch.blobs.items():
        num_rows_H, values_N = batch.of_held(blob.num_rows_B), blob.values_N
        if KINDS[name].rows == "any":
            found[name] = ModelTensor(values_N[row_places(num_rows_H, places)])
            found[f"{name}.num_rows"] = ModelTensor(num_rows_H[places])
            continue
        is_there_N = laid.within_N < num_rows_H[places][laid.sample_N]
        place_N = laid.place_N[is_there_N]
        row_N = (starts_of(num_rows_H)[places][laid.sample_N] + laid.within_N)[is_there_N]
        value_S = torch.zeros(total, *values_N.shape[1:], dtype=values_N.dtype)
        value_S[place_N] = values_N[row_N]
        is_there_S = torch.zeros(total, dtype=torch.bool)
        is_there_S[place_N] = True
        found[name] = ModelTensor(value_S, is_per_position=True)
        found[f"{name}.is_there"] = ModelTensor(is_there_S, is_per_position=True)
    return found


def unpack(micros: Sequence[MicroBatch], columns: Sequence[Tensor], batch: RolloutBatch) -> Tensor:
    """Combines per-position results into one token-aligned column.

    Args:
        columns: One tensor (S,) or (S, K) per micro-batch, aligned with its positions, on any
            device; values outside `loss_mask_S` are ignored.

    Returns:
        (T,) or (T, K) float32 on the CPU, for the tokens that `batch` holds; zero for prompt tokens
        and for samples that are in no micro-batch.
    """
    column_T = torch.zeros(batch.num_tokens, *columns[0].shape[1:])
    for micro, column_S in zip(micros, columns, strict=True):
        if column_S.shape[:1] != micro.loss_mask_S.shape:
            raise ValueError(f"{tuple(column_S.shape)} results for {micro.num_positions} positions")
        index_B = torch.tensor(micro.sample_indices, dtype=torch.int64)
        # A sync point, once per step and column, because the batch is on the CPU.
        found_S = column_S.detach().to("cpu", torch.float32)
        source_N = _tokens_of(batch, index_B)[0]
        response_N = batch.response_mask_T[source_N]
        column_T[source_N[response_N]] = found_S[micro.loss_mask_S.to("cpu")]
    return column_T


class _Layout(NamedTuple):
    """Positions of N tokens in a micro-batch; other fields are as in MicroBatch.

    Args:
        source_N: Index of the token in the batch.
        sample_N: Index of the token's sample in the micro-batch.
        within_N: Index of the token within its sample.
        place_N: Position of the token in the micro-batch.
    """

    source_N: Tensor
    sample_N: Tensor
    within_N: Tensor
    place_N: Tensor
    positions_S: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    prefix_sequences: tuple[int, ...] | None


def _lay_out(
    batch: RolloutBatch,
    index_B: Tensor,
    pad_each: int,
    pad_total: int,
    shares_prompts: bool,
    branches: Branches | None,
) -> _Layout:
    lengths = batch.lengths_B[index_B].tolist()
    if branches is None:
        prefixes, leaders = _shared(batch, index_B.tolist(), shares_prompts)
        segments, own_B, prefix_B, prefix_sequences = _segments(lengths, prefixes, leaders)
    else:
        _check_branches(batch, index_B, branches)
        prefixes, prefix_sequences = list(branches.shared), list(branches.parents)
        leaders = [False] * len(prefixes)  # the sequence that is continued stores them
        segments = [length - n for length, n in zip(lengths, prefixes, strict=True)]
        own_B = prefix_B = list(range(len(lengths)))
    bounds = packed_bounds(segments, pad_each, pad_total)
    source_N, within_N, sample_N = _tokens_of(batch, index_B)
    starts = torch.tensor(bounds.starts, dtype=torch.int64)
    shared_N = torch.tensor(prefixes, dtype=torch.int64)[sample_N]
    is_own_N = within_N >= shared_N
    own_N = starts[own_B][sample_N] + within_N - shared_N
    place_N = torch.where(is_own_N, own_N, starts[prefix_B][sample_N] + within_N)
    held_N = is_own_N | torch.tensor(leaders, dtype=torch.bool)[sample_N]
    cu_seqlens = torch.tensor(bounds.cu_seqlens, dtype=torch.int32)
    counts = cu_seqlens.diff().long()
    # Length of the shared prefix before each sequence.
    read = torch.zeros(len(counts), dtype=torch.int64)
    read[own_B] = torch.tensor(prefixes, dtype=torch.int64)
    first_S = torch.repeat_interleave(cu_seqlens[:-1].long() - read, counts)
    is_shared, num_padding = any(prefixes), len(counts) - len(prefix_sequences)
    return _Layout(
        source_N[held_N],
        sample_N[held_N],
        within_N[held_N],
        place_N[held_N],
        torch.arange(bounds.total) - first_S,
        cu_seqlens,
        int((read + counts).max()) if is_shared else bounds.max_seqlen,
        (*prefix_sequences, *[-1] * num_padding) if is_shared else None,
    )


def _tokens_of(batch: RolloutBatch, index_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each token's index in the batch, its index in its sample, and its sample."""
    places = batch.places_of(index_B)
    if bool((places < 0).any()):
        raise ValueError(f"the tokens of samples {index_B[places < 0].tolist()} are on other ranks")
    lengths_B = batch.lengths_B[index_B]
    sample_N = torch.repeat_interleave(lengths_B)
    within_N = torch.arange(len(sample_N)) - (lengths_B.cumsum(0) - lengths_B)[sample_N]
    return batch.token_places(places), within_N, sample_N


def _shared(
    batch: RolloutBatch, indices: Sequence[int], shares_prompts: bool
) -> tuple[list[int], list[bool]]:
    """Returns, for each sample, how many leading tokens it shares, and whether it stores them."""
    groups = (
        batch.prompt_group_B[list(indices)].tolist()
        if shares_prompts
        else list(range(len(indices)))
    )
    prefixes, leaders = [], []
    for _, run in groupby(range(len(indices)), key=groups.__getitem__):
        samples = list(run)
        prompt_length = int(batch.prompt_lengths_B[indices[samples[0]]])
        prefixes += [shared_prefix(prompt_length, len(samples))] * len(samples)
        leaders += [True] + [False] * (len(samples) - 1)
    return prefixes, leaders


def _check_branches(batch: RolloutBatch, index_B: Tensor, branches: Branches) -> None:
    """Verifies that sequences begin with the tokens that they share, and train none of them."""
    starts_B = starts_of(batch.lengths_H)[batch.places_of(index_B)]
    for row, (parent, shared) in enumerate(zip(branches.parents, branches.shared, strict=True)):
        if shared:
            own, other = (int(starts_B[one]) for one in (row, parent))
            same = batch.tokens_T[own : own + shared] == batch.tokens_T[other : other + shared]
            if not bool(same.all()):
                raise RuntimeError(f"sequences {parent} and {row} do not begin with equal tokens")
            if bool(batch.response_mask_T[own : own + shared + 1].any()):
                raise RuntimeError(f"sequence {row} trains a token that sequence {parent} stores")


def _segments(
    lengths: Sequence[int], prefixes: Sequence[int], leaders: Sequence[bool]
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Returns the sequences of a micro-batch.

    The lists are: the length of each sequence; for each sample, its own sequence; for each sample,
    the sequence that it continues (its own if it shares nothing); for each sequence, the sequence
    that it continues, or -1.
    """
    segments: list[int] = []
    own, prefix_of, prefix_sequences = [], [], []
    for length, prefix, is_leader in zip(lengths, prefixes, leaders, strict=True):
        if prefix and is_leader:
            first = len(segments)
            segments.append(prefix)
            prefix_sequences.append(-1)
        own.append(len(segments))
        prefix_of.append(first if prefix else len(segments))
        prefix_sequences.append(first if prefix else -1)
        segments.append(length - prefix)
    return segments, own, prefix_of, prefix_sequences
