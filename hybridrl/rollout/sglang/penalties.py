"""Applies minimum lengths and penalties to SGLang's requests, using a table of their tokens on the
device.

SGLang's own penalizers are not used, because their repetition penalty ignores the prompt, they
forget the response when a request is retracted or continued, and they apply penalties to a running
batch in a different order than to a single request.

Each request with penalties has a row in a table. Every pass over the request's prompt rewrites the
row from the tokens on the host. Each draw adds the drawn token to the row on the device, even
before the host knows the token. If tokens are discarded, the next pass over the prompt removes them
from the row. Invariant: before a draw, the row contains all earlier tokens.
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


class _Penalized(NamedTuple):
    """A request with penalties. SGLang's prompt is `num_prompt` tokens, then response tokens."""

    sampling: SamplingParams
    num_prompt: int


class _Batch(NamedTuple):
    """Rows with penalties: positions in the batch (None for all rows), and table rows."""

    names: list[str]
    row_K: Tensor | None
    slot_K: Tensor
    penalties: PenaltyRows


class TokenTable:
    """Tokens of requests with penalties; passes must run in turn, on one stream."""

    def __init__(self) -> None:
        self._penalized: dict[str, _Penalized] = {}
        self._slots: dict[str, int] = {}
        self._table: Tensor | None = None  # (slots, vocabulary) uint8, see common/penalties.py
        # Requests of the next pass, and whether the pass computes prompts.
        self._next: tuple[Sequence[Any], bool] | None = None
        self._batch: _Batch | None = None

    def add(self, name: str, request: Request) -> None:
        self._penalized[name] = _Penalized(request.sampling, len(request.prompt))

    def remove(self, name: str) -> None:
        if self._penalized.pop(name, None) is not None:
            self._slots.pop(name, None)
            if not self._penalized:
                self.clear()

    def clear(self) -> None:
        self._penalized.clear()
        self._slots.clear()
        self._table = self._batch = self._next = None

    def prepare(self, requests: Sequence[Any], has_prompts: bool) -> None:
        """Sets the requests in the next pass, and whether the pass computes their prompts."""
        self._next = (requests, has_prompts) if self._penalized else None

    def penalized(self, logits_BV: Tensor, position_B: Tensor) -> Tensor:
        """Returns the pass's logits with penalties; position_B has each row's last position."""
        batch = self._rows(logits_BV)
        if batch is None or self._table is None:
            return logits_BV
        rows, length_B = batch.row_K, position_B.long() + 1
        if rows is None:
            return penalize(logits_BV, batch.penalties, self._table[batch.slot_K], length_B)
        seen_KV = self._table[batch.slot_K]
        part_KV = penalize(logits_BV[rows], batch.penalties, seen_KV, length_B[rows])
        return logits_BV.float().index_copy(0, rows, part_KV)

    def note(self, token_B: Tensor) -> None:
        """Adds the tokens drawn from the pass's logits, (B,) int64."""
        if self._next is None or self._batch is None or self._table is None:
            return
        token_K = token_B if self._batch.row_K is None else token_B[self._batch.row_K]
        place_K = self._batch.slot_K * self._table.size(1) + token_K
        self._table.view(-1).index_fill_(0, place_K, IN_RESPONSE)

    def _rows(self, logits_BV: Tensor) -> _Batch | None:
        """Writes missing tokens to the table, and returns the pass's rows that have penalties."""
        if self._next is None:
            return None
        requests, has_prompts = self._next
        names = [request.rid for request in requests]
        if not has_prompts and self._batch is not None and self._batch.names == names:
            return self._batch
        rows = [row for row, name in enumerate(names) if name in self._penalized]
        if not rows:
            self._batch = None
            return None
        if has_prompts:
            self._write([requests[row] for row in rows], logits_BV)
        device = logits_BV.device
        sampling, prompts = zip(*(self._penalized[names[row]] for row in rows), strict=True)
        slots = [self._slots[names[row]] for row in rows]
        self._batch = _Batch(
            names,
            None if len(rows) == len(names) else on_device(torch.tensor(rows), device),
            on_device(torch.tensor(slots), device),
            PenaltyRows.of(sampling, prompts, device),
        )
        return self._batch

    def _write(self, requests: Sequence[Any], logits_BV: Tensor) -> None:
        names = [request.rid for request in requests]
        new = [name for name in names if name not in self._slots]
        free = set(range(len(self._slots) + len(new))) - set(self._slots.values())
        self._slots.update(zip(new, sorted(free), strict=False))
        table = self._with_room(max(self._slots.values()) + 1, logits_BV)
        histories = []
        for request, name in zip(requests, names, strict=True):
            given, num_prompt = request.origin_input_ids, self._penalized[name].num_prompt
            prompt, response = given[:num_prompt], given[num_prompt:]
            histories.append(TokenHistory(prompt, [*response, *request.output_ids]))
        mark(table, [self._slots[name] for name in names], histories)

    def _with_room(self, num_slots: int, logits_BV: Tensor) -> Tensor:
        old = self._table
        if old is not None and len(old) >= num_slots:
            return old
        size = 1 << (num_slots - 1).bit_length(), logits_BV.size(1)
        self._table = torch.zeros(size, dtype=torch.uint8, device=logits_BV.device)
        if old is not None:
            self._table[: len(old)] = old
        return self._table
