"""Sends per-sample values (lengths, groups, rewards) to all ranks. Does not send tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridrl.contracts.batch import (
    GREEDY,
    LENGTHS,
    BatchError,
    Blob,
    Producer,
    Prompt,
    ScoredBatch,
)
from hybridrl.contracts.checks import columns_of
from hybridrl.contracts.holders import Holders, Ranks
from hybridrl.contracts.ragged import repeated_versions

Table = dict[str, Any]
"""Per-sample columns of a batch, as arrays by name."""


def with_greedy_rewards(batch: ScoredBatch) -> ScoredBatch | None:
    """Makes each greedy response's reward a reward part of its group; drops groups without one."""
    is_greedy_B = batch.sample_ids_B < 0
    groups = batch.group_B[is_greedy_B].tolist()
    reward_of = dict(zip(groups, batch.reward_B[is_greedy_B].tolist(), strict=True))
    rows = [
        i
        for i, group in enumerate(batch.group_B.tolist())
        if not is_greedy_B[i] and group in reward_of
    ]
    if not rows:
        return None
    sampled = batch.select(rows)
    greedy_B = torch.tensor([reward_of[group] for group in sampled.group_B.tolist()])
    return sampled.with_parts({GREEDY: greedy_B})


def with_token_versions(batch: ScoredBatch) -> ScoredBatch:
    """Returns the batch with a version per token, even if each response has only one version."""
    if batch.versions_T is not None:
        return batch
    held = map(batch.of_held, (batch.versions_B, batch.lengths_B, batch.prompt_lengths_B))
    return batch.join_columns(batch.producer, versions_T=repeated_versions(*held))


def table_of(batch: ScoredBatch) -> Table:
    """Returns a batch's per-sample columns, to send to all ranks; this rank has all tokens."""
    declared = columns_of(ScoredBatch)
    names = [name for name in batch.columns() if not declared[name].per_token]
    table: Table = {name: getattr(batch, name).numpy() for name in (*names, *LENGTHS)}
    table["num_observed_B"] = None
    if batch.observed_T is not None:
        table["num_observed_B"] = batch.observed_lengths_B.numpy()
    table["blobs"] = {
        name: (blob.num_rows_B.numpy(), blob.values_N[:0].clone())
        for name, blob in batch.blobs.items()
    }
    table["has_versions"] = batch.versions_T is not None
    table["reward_parts"] = {name: part.numpy() for name, part in batch.reward_parts.items()}
    return table


def gathered_batch(
    tables: Sequence[Table | None],
    own: ScoredBatch | None,
    prompts: Mapping[int, Prompt],
    ranks: Ranks,
) -> ScoredBatch:
    """Returns a batch with all ranks' samples in ascending order and the tokens of `own`. There is
    a table per rank, None if it has no samples; at least one rank has some. Prompts are by group.
    """
    found = [table for table in tables if table is not None]
    counts = [0 if table is None else len(table["sample_ids_B"]) for table in tables]
    columns: dict[str, Any] = {name: [table[name] for table in found] for name in found[0]}
    parts = columns.pop("reward_parts")
    observed, blobs = columns.pop("num_observed_B"), columns.pop("blobs")
    sizes = [count for count in counts if count]
    has_versions = any(columns.pop("has_versions"))
    has_observed = any(count_B is not None for count_B in observed)
    if has_observed:
        pairs = zip(observed, sizes, strict=True)
        columns["num_observed_B"] = [
            np.zeros(size, np.int64) if count_B is None else count_B for count_B, size in pairs
        ]
    # A stable sort keeps the order of a sample's sequences.
    order = np.concatenate(columns["sample_ids_B"]).argsort(kind="stable")
    maker_B = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)[order])
    tensors, part_tensors = (
        {name: torch.from_numpy(np.concatenate(arrays)[order]) for name, arrays in group.items()}
        for group in (columns, {name: [part[name] for part in parts] for name in parts[0]})
    )
    if own is not None and bool((own.sample_ids_B.diff() < 0).any()):
        own = own.select(own.sample_ids_B.argsort(stable=True))
    if own is not None and has_versions:
        own = with_token_versions(own)
    return ScoredBatch(
        prompts=tuple(prompts[group] for group in tensors["group_B"].tolist()),
        reward_parts=part_tensors,
        producer=Producer.here("the gathered rollouts"),
        holders=Holders(maker_B[:, None] == torch.arange(len(counts)), ranks),
        blobs=_blobs(blobs, own, sizes, order),
        **tensors,
        **_own_tokens(own, has_observed, has_versions),
    )


def _blobs(
    table_blobs: Sequence[Mapping[str, tuple[Any, torch.Tensor]]],
    own: ScoredBatch | None,
    sizes: Sequence[int],
    order: Any,
) -> dict[str, Blob]:
    """Returns the blobs of all samples in the given order, with rows only for this rank's samples.
    `table_blobs` has, for each table and blob name, the numbers of rows and an empty array of the
    same type and row shape.
    """
    found = {}
    for name in {name: None for blobs in table_blobs for name in blobs}:
        empty, *others = [blobs[name][1] for blobs in table_blobs if name in blobs]
        if other := [o for o in others if (o.shape, o.dtype) != (empty.shape, empty.dtype)]:
            got = f"returned rows of {tuple(other[0].shape[1:])} {other[0].dtype} on some rank"
            allowed = f"{tuple(empty.shape[1:])} {empty.dtype} on all ranks"
            raise BatchError(Producer.here("the gathered rollouts"), name, got, allowed)
        num_rows = [
            blobs[name][0] if name in blobs else np.zeros(size, np.int64)
            for blobs, size in zip(table_blobs, sizes, strict=True)
        ]
        mine = None if own is None else own.blobs.get(name)
        values_N = empty if mine is None else mine.values_N
        found[name] = Blob(values_N, torch.from_numpy(np.concatenate(num_rows)[order]))
    return found


def _own_tokens(
    own: ScoredBatch | None, has_observed: bool, has_versions: bool
) -> dict[str, torch.Tensor]:
    """Returns the per-token columns for this rank's samples; empty columns if it has none."""
    num_tokens = 0 if own is None else own.num_tokens
    absent = set() if has_observed else {"observed_T"}
    if not has_versions:
        absent.add("versions_T")
    given = {} if own is None else own.columns()
    return {
        name: given.get(name, torch.zeros(num_tokens, dtype=column.dtype))
        for name, column in columns_of(ScoredBatch).items()
        if column.per_token and name not in absent
    }
