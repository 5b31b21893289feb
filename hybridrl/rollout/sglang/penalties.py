"""Least lengths and penalties of SGLang's requests: which tokens each has, kept on the device.

SGLang's own penalizers are not used: their repetition penalty passes over the prompt, a request
that is taken back or continued counts as one that has said nothing, and a running batch adds
penalties in another order than one alone.

A request that asks for any has a row of a table. Every pass over its prompt writes the row from the
tokens that the host has; each draw adds its token, where logits are computed, whether or not the
host knows it yet. What is drawn for nobody is overwritten by the pass over the prompt that follows.
Invariant: before a draw the row has all tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridrl.rollout.common.penalties import (
    IN_RESPONSE,
    PenaltyRows,
    TokenHistory,
    mark,
    on_device,
    penalize,
)
from hybridrl.rollout.engine import Request, SamplingParams


class _Asked(NamedTuple):
    """What a request asks for, and how many of the tokens that SGLang was given are its prompt."""

    sampling: SamplingParams
    num_prompt: int


class _Batch(NamedTuple):
    """The rows of a batch that ask for something: `row_K` are their places in it (None: all, in
    order), `slot_K` their rows of the table.
    """

    names: list[str]
    row_K: Tensor | None
    slot_K: Tensor
    penalties: PenaltyRows


class TokenTable:
    """The tokens of requests that look back, and what they make of logits.

    Costs nothing while there is no such request. Names are SGLang's for its requests; passes are
    computed one after the other, on one stream.
    """

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}
        self._slots: dict[str, int] = {}
        self._table: Tensor | None = None  # (slots, vocabulary) uint8, of penalties.py
        # The requests of the pass to come, whether it goes over prompts; and the last batch.
        self._next: tuple[Sequence[Any], bool] | None = None
        self._batch: _Batch | None = None

    def add(self, name: str, request: Request) -> None:
        """Takes in a request that looks back, which SGLang was given."""
        self._asked[name] = _Asked(request.sampling, len(request.prompt))

    def remove(self, name: str) -> None:
        """Forgets a request that has ended, if it is there."""
        if self._asked.pop(name, None) is not None:
            self._slots.pop(name, None)
            if not self._asked:
                self.clear()

    def clear(self) -> None:
        """Forgets all requests, and gives the memory back."""
        self._asked.clear()
        self._slots.clear()
        self._table = self._batch = self._next = None

    def look(self, requests: Sequence[Any], has_prompts: bool) -> None:
        """Notes whose logits come next, and whether the pass computes their prompts."""
        self._next = (requests, has_prompts) if self._asked else None

    def penalized(self, logits_BV: Tensor, position_B: Tensor) -> Tensor:
        """Returns the logits of the pass as its requests ask. `position_B` is that of the last
        token of each row.
        """
        batch = self._rows(logits_BV)
        if batch is None or self._table is None:
            return logits_BV
        rows, length_B = batch.row_K, position_B.long() + 1
        if rows is None:
            return penalize(logits_BV, batch.penalties, self._table[batch.slot_K], length_B)
        part = logits_BV[rows], batch.penalties, self._table[batch.slot_K], length_B[rows]
        return logits_BV.float().index_copy(0, rows, penalize(*part))

    def note(self, token_B: Tensor) -> None:
        """Adds what was drawn from those logits, (B,) int64."""
        if self._next is None or self._batch is None or self._table is None:
            return
        token_K = token_B if self._batch.row_K is None else token_B[self._batch.row_K]
        place_K = self._batch.slot_K * self._table.size(1) + token_K
        self._table.view(-1).index_fill_(0, place_K, IN_RESPONSE)

    def _rows(self, logits_BV: Tensor) -> _Batch | None:
        """Returns the rows of the pass that ask for something, with their tokens in the table."""
        if self._next is None:
            return None
        requests, has_prompts = self._next
        names = [request.rid for request in requests]
        if not has_prompts and self._batch is not None and self._batch.names == names:
            return self._batch
        rows = [row for row, name in enumerate(names) if name in self._asked]
        if not rows:
            self._batch = None
            return None
        if has_prompts:
            self._write([requests[row] for row in rows], logits_BV)
        device = logits_BV.device
        asked = [self._asked[names[row]] for row in rows]
        sampling, prompts = [one.sampling for one in asked], [one.num_prompt for one in asked]
        slots = [self._slots[names[row]] for row in rows]
        self._batch = _Batch(
            names,
            None if len(rows) == len(names) else on_device(torch.tensor(rows), device),
            on_device(torch.tensor(slots), device),
            PenaltyRows.of(sampling, prompts, device),
        )
        return self._batch

    def _write(self, requests: Sequence[Any], logits_BV: Tensor) -> None:
        """Writes rows of the table, of requests whose prompts are computed."""
        names = [request.rid for request in requests]
        new = [name for name in names if name not in self._slots]
        free = set(range(len(self._slots) + len(new))) - set(self._slots.values())
        self._slots.update(zip(new, sorted(free), strict=False))
        table = self._with_room(max(self._slots.values()) + 1, logits_BV)
        said = []
        for request, name in zip(requests, names, strict=True):
            given, num_prompt = request.origin_input_ids, self._asked[name].num_prompt
            prompt, response = given[:num_prompt], given[num_prompt:]
            said.append(TokenHistory(prompt, [*response, *request.output_ids]))
        mark(table, [self._slots[name] for name in names], said)

    def _with_room(self, num_slots: int, logits_BV: Tensor) -> Tensor:
        """Returns the table with so many rows at least."""
        old = self._table
        if old is not None and len(old) >= num_slots:
            return old
        size = 1 << (num_slots - 1).bit_length(), logits_BV.size(1)
        self._table = torch.zeros(size, dtype=torch.uint8, device=logits_BV.device)
        if old is not None:
            self._table[: len(old)] = old
        return self._table
