"""What all ranks know of a step's samples: lengths, groups, rewards. Tokens stay where they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hybridrl.contracts.batch import GREEDY, LENGTHS, Producer, Prompt, ScoredBatch
from hybridrl.contracts.checks import columns_of
from hybridrl.contracts.holders import Holders, Ranks
from hybridrl.contracts.versions import repeated_versions

Table = dict[str, Any]
"""The per-sample columns of a batch, as arrays by name."""


def compared_with_greedy(batch: ScoredBatch) -> ScoredBatch | None:
    """Makes the rewards of greedy responses a part of their groups' samples; without groups whose
    greedy response has no reward.
    """
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
    """Returns the batch with the version of each token, also where one made each response."""
    if batch.versions_T is not None:
        return batch
    held = map(batch.of_held, (batch.versions_B, batch.lengths_B, batch.prompt_lengths_B))
    return batch.join_columns(batch.producer, versions_T=repeated_versions(*held))


def table_of(batch: ScoredBatch) -> Table:
    """Returns the per-sample columns of a batch that is whole on its rank, to be told to all."""
    declared = columns_of(ScoredBatch)
    names = [name for name in batch.columns() if not declared[name].per_token]
    table: Table = {name: getattr(batch, name).numpy() for name in (*names, *LENGTHS)}
    table["num_observed_B"] = None
    if batch.observed_T is not None:
        table["num_observed_B"] = batch.observed_lengths_B.numpy()
    experts = batch.routed_experts_TK
    table["experts"] = None if experts is None else (experts.shape[1], experts.dtype)
    table["has_versions"] = batch.versions_T is not None
    table["reward_parts"] = {name: part.numpy() for name, part in batch.reward_parts.items()}
    return table


def gathered_batch(
    tables: Sequence[Table | None],
    own: ScoredBatch | None,
    prompts: Mapping[int, Prompt],
    ranks: Ranks,
) -> ScoredBatch:
    """Returns the batch of all ranks' samples, in order of their numbers; each rank has the tokens
    of its own.

    Args:
        tables: by rank, None where it has no sample; of one rank or more there is one.
        own: this rank's.
        prompts: by group.
        ranks: all.
    """
    found = [table for table in tables if table is not None]
    counts = [0 if table is None else len(table["sample_ids_B"]) for table in tables]
    columns: dict[str, Any] = {name: [table[name] for table in found] for name in found[0]}
    parts = columns.pop("reward_parts")
    observed, experts = columns.pop("num_observed_B"), columns.pop("experts")[0]
    has_versions = any(columns.pop("has_versions"))
    has_observed = any(one is not None for one in observed)
    if has_observed:
        sizes = [count for count in counts if count]
        pairs = zip(observed, sizes, strict=True)
        columns["num_observed_B"] = [
            np.zeros(size, np.int64) if one is None else one for one, size in pairs
        ]
    order = np.concatenate(columns["sample_ids_B"]).argsort()
    maker_B = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)[order])
    tensors, part_tensors = (
        {name: torch.from_numpy(np.concatenate(one)[order]) for name, one in given.items()}
        for given in (columns, {name: [part[name] for part in parts] for name in parts[0]})
    )
    if own is not None and bool((own.sample_ids_B.diff() < 0).any()):
        own = own.select(own.sample_ids_B.argsort())
    if own is not None and has_versions:
        own = with_token_versions(own)
    return ScoredBatch(
        prompts=tuple(prompts[group] for group in tensors["group_B"].tolist()),
        reward_parts=part_tensors,
        producer=Producer.here("the gathered rollouts"),
        holders=Holders(maker_B[:, None] == torch.arange(len(counts)), ranks),
        **tensors,
        **_own_tokens(own, has_observed, has_versions, experts),
    )


def _own_tokens(
    own: ScoredBatch | None,
    has_observed: bool,
    has_versions: bool,
    experts: tuple[int, torch.dtype] | None,
) -> dict[str, torch.Tensor]:
    """Returns the per-token columns of this rank's samples; empty ones if it has none.

    Args:
        own: of this rank.
        has_observed: whether some rank has observations.
        has_versions: whether some rank has a sample that several versions made.
        experts: width and dtype of the column of experts; None: there is none.
    """
    num_tokens = 0 if own is None else own.num_tokens
    absent = set() if has_observed else {"observed_T"}
    if not has_versions:
        absent.add("versions_T")
    empty: dict[str, torch.Tensor] = {}
    if experts is None:
        absent.add("routed_experts_TK")
    else:
        empty["routed_experts_TK"] = torch.zeros(num_tokens, experts[0], dtype=experts[1])
    given = empty | ({} if own is None else own.columns())
    return {
        name: given.get(name, torch.zeros(num_tokens, dtype=column.dtype))
        for name, column in columns_of(ScoredBatch).items()
        if column.per_token and name not in absent
    }
