"""Least lengths and penalties: logits that depend on what a request has said before.

Owns their definition, for all rows of a batch at once where the logits are. Which tokens were said
is given; an engine that keeps them on the device has its own way (sglang/penalties.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hybridrl.rollout.engine import SamplingParams

# What a row has of each token of the vocabulary, uint8; 0: nothing.
IN_PROMPT = 1  # and not in the response
IN_RESPONSE = 2


class Said(NamedTuple):
    """The tokens of a request so far."""

    prompt: Sequence[int]
    response: Sequence[int]


@dataclass(frozen=True)
class PenaltyRows:
    """What each row of a batch asks for, on the device of its logits.

    `end_row_E` and `end_token_E` are the rows with a least length and their end tokens; `least_E`
    is the number of tokens of prompt and response before which that token is not drawn.
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
        """Returns the rows of these requests; the host waits for no device."""
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
    """Returns a tensor of the host on a device, for which the host does not wait."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def mark(table_SV: Tensor, slots: Sequence[int], said: Sequence[Said]) -> None:
    """Writes these rows of a (slots, vocabulary) uint8 table of IN_PROMPT and IN_RESPONSE."""
    vocab, device = table_SV.size(1), table_SV.device
    table_SV.index_fill_(0, on_device(torch.tensor(slots), device), 0)
    for part, value in ((0, IN_PROMPT), (1, IN_RESPONSE)):
        places = [
            slot * vocab + np.asarray(one[part], dtype=np.int64)
            for slot, one in zip(slots, said, strict=True)
        ]
        place_N = torch.from_numpy(np.concatenate(places))
        table_SV.view(-1).index_fill_(0, on_device(place_N, device), value)


def penalize(
    logits_BV: Tensor, rows: PenaltyRows, said_BV: Tensor | None, length_B: Tensor
) -> Tensor:
    """Returns float32 logits without end tokens that come too early and with penalties of tokens
    that were said, in vLLM's order: end tokens, repetition, presence. A row that asks for nothing
    keeps its logits to the bit.

    Args:
        said_BV: uint8, 0, IN_PROMPT or IN_RESPONSE; None: no row asks for penalties.
        length_B: int64, tokens of prompt and response so far.
    """
    logits_BV = logits_BV.to(torch.float32, copy=True)
    ends_E = logits_BV[rows.end_row_E, rows.end_token_E]
    is_early_E = length_B[rows.end_row_E] < rows.least_E
    ends_E = ends_E.masked_fill(is_early_E, -torch.inf)
    logits_BV[rows.end_row_E, rows.end_token_E] = ends_E
    if said_BV is None:
        return logits_BV
    penalty_B1 = rows.repetition_B1
    repeated_BV = torch.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    logits_BV = torch.where(said_BV > 0, repeated_BV, logits_BV)
    return logits_BV.sub_(rows.presence_B1 * (said_BV == IN_RESPONSE))


def penalized(
    logits_BV: Tensor, sampling: Sequence[SamplingParams], said: Sequence[Said]
) -> Tensor:
    """Returns logits with `penalize` applied to the rows that ask for it."""
    rows = [row for row, one in enumerate(sampling) if one.looks_back]
    if not rows:
        return logits_BV
    asked, tokens = [sampling[row] for row in rows], [said[row] for row in rows]
    device, said_KV = logits_BV.device, None
    if any(one.repetition_penalty != 1 or one.presence_penalty != 0 for one in asked):
        said_KV = torch.zeros(
            (len(rows), logits_BV.size(1)), dtype=torch.uint8, device=logits_BV.device
        )
        mark(said_KV, range(len(rows)), tokens)
    penalties = PenaltyRows.of(asked, [len(one.prompt) for one in tokens], device)
    lengths = torch.tensor([len(one.prompt) + len(one.response) for one in tokens])
    row_K, length_K = on_device(torch.tensor(rows), device), on_device(lengths, device)
    part_KV = penalize(logits_BV[row_K], penalties, said_KV, length_K)
    return logits_BV.float().index_copy(0, row_K, part_KV)
