"""Applies minimum lengths and penalties to logits, depending on a request's earlier tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridrl.rollout.engine import SamplingParams

# For each token of the vocabulary, uint8: where it occurs in a request; 0 if it does not occur.
IN_PROMPT = 1  # but not in the response
IN_RESPONSE = 2


class TokenHistory(NamedTuple):
    prompt: Sequence[int]
    response: Sequence[int]


@dataclass(frozen=True)
class PenaltyRows:
    """Penalty parameters of a batch, on the device of its logits.

    `end_row_E` and `end_token_E` have an entry per stop token of each row with a minimum length,
    and `least_E` the number of prompt and response tokens before which it must not be drawn.
    """

    repetition_B1: Tensor
    presence_B1: Tensor
    end_row_E: Tensor
    end_token_E: Tensor
    least_E: Tensor

    @staticmethod
    def of(
        sampling: Sequence[SamplingParams], prompt_lengths: Sequence[int], device: torch.device
    ) -> PenaltyRows:
        """Returns the penalty parameters of these requests, without synchronizing."""
        ends = [
            (place, token, length + row.min_new_tokens)
            for place, (row, length) in enumerate(zip(sampling, prompt_lengths, strict=True))
            for token in (row.stop_token_ids if row.min_new_tokens else ())
        ]
        factors = [(row.repetition_penalty, row.presence_penalty) for row in sampling]
        factor_B2 = on_device(torch.tensor(factors), device)
        end_E3 = on_device(torch.tensor(ends, dtype=torch.int64).view(-1, 3), device)
        return PenaltyRows(factor_B2[:, :1], factor_B2[:, 1:], *end_E3.unbind(1))


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to a device without synchronizing."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def mark(table_SV: Tensor, slots: Sequence[int], histories: Sequence[TokenHistory]) -> None:
    """Rewrites rows of a (slots, vocabulary) uint8 table with IN_PROMPT and IN_RESPONSE."""
    vocab, device = table_SV.size(1), table_SV.device
    table_SV.index_fill_(0, on_device(torch.tensor(slots), device), 0)
    for part, value in ((0, IN_PROMPT), (1, IN_RESPONSE)):
        places = [
            slot * vocab + np.asarray(history[part], dtype=np.int64)
            for slot, history in zip(slots, histories, strict=True)
        ]
        place_N = torch.from_numpy(np.concatenate(places))
        table_SV.view(-1).index_fill_(0, on_device(place_N, device), value)


def penalize(
    logits_BV: Tensor, rows: PenaltyRows, seen_BV: Tensor | None, length_B: Tensor
) -> Tensor:
    """Returns float32 logits with penalties, in vLLM's order, and without early stop tokens.

    Logits of rows without penalties do not change.

    Args:
        seen_BV: 0, IN_PROMPT or IN_RESPONSE, uint8; None if no row has penalties.
        length_B: Number of prompt and response tokens so far, int64.
    """
    logits_BV = logits_BV.to(torch.float32, copy=True)
    ends_E = logits_BV[rows.end_row_E, rows.end_token_E]
    is_early_E = length_B[rows.end_row_E] < rows.least_E
    ends_E = ends_E.masked_fill(is_early_E, -torch.inf)
    logits_BV[rows.end_row_E, rows.end_token_E] = ends_E
    if seen_BV is None:
        return logits_BV
    penalty_B1 = rows.repetition_B1
    repeated_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    logits_BV = torch.where(seen_BV > 0, repeated_BV, logits_BV)
    return logits_BV.sub_(rows.presence_B1 * (seen_BV == IN_RESPONSE))


def penalized(
    logits_BV: Tensor, sampling: Sequence[SamplingParams], histories: Sequence[TokenHistory]
) -> Tensor:
    """Applies `penalize` to the rows that need it, and returns all logits."""
    rows = [row for row, params in enumerate(sampling) if params.needs_history]
    if not rows:
        return logits_BV
    sampling, histories = [sampling[row] for row in rows], [histories[row] for row in rows]
    device, seen_KV = logits_BV.device, None
    if any(row.repetition_penalty != 1 or row.presence_penalty != 0 for row in sampling):
        seen_KV = torch.zeros((len(rows), logits_BV.size(1)), dtype=torch.uint8, device=device)
        mark(seen_KV, range(len(rows)), histories)
    penalties = PenaltyRows.of(sampling, [len(history.prompt) for history in histories], device)
    lengths = torch.tensor([len(prompt) + len(response) for prompt, response in histories])
    row_K, length_K = on_device(torch.tensor(rows), device), on_device(lengths, device)
    part_KV = penalize(logits_BV[row_K], penalties, seen_KV, length_K)
    return logits_BV.float().index_copy(0, row_K, part_KV)
