"""Scored batches on their way from the replicas to all ranks, as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.batch import GREEDY, LENGTHS, Producer, Prompt, ScoredBatch


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


def as_columns(batch: ScoredBatch) -> dict[str, Any]:
    """Returns the arrays of a batch, to be sent; `rebuilt` makes the batch of them."""
    names = (*batch.columns(), *LENGTHS)
    columns: dict[str, Any] = {name: getattr(batch, name).numpy() for name in names}
    columns["reward_parts"] = {name: part.numpy() for name, part in batch.reward_parts.items()}
    return columns


def rebuilt(columns: Mapping[str, Any], prompts: Mapping[int, Prompt]) -> ScoredBatch:
    """Returns the batch of these arrays; `prompts` by group."""
    names = columns.keys() - {"reward_parts"}
    tensors = {name: torch.from_numpy(columns[name]) for name in names}
    parts = columns["reward_parts"].items()
    return ScoredBatch(
        prompts=tuple(prompts[group] for group in columns["group_B"].tolist()),
        reward_parts={name: torch.from_numpy(part) for name, part in parts},
        producer=Producer.here("the gathered rollouts"),
        **tensors,
    )
