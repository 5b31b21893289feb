"""Counters of vLLM requests that all decode one token per step, while none begins, ends or leaves.

Each step then changes the same few counters of every request by one. This module counts for all
requests together, and writes the counters before vLLM reads them: to a single request at a block
boundary of the KV cache, and to all requests when the series of steps ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Maximum number of steps whose tokens are buffered before they are written to the requests.
MAX_BUFFERED = 256


class SteadyRows:
    """All running requests, which decode together (`fit`), in the scheduler's order.

    Args:
        size: Number of tokens in a cache block; at least 3.
        is_async: Whether a step is scheduled before the previous step's tokens are known.
    """

    def __init__(
        self, requests: Sequence[Any], size: int, max_model_len: int, is_async: bool
    ) -> None:
        self._requests, self._is_async = list(requests), is_async
        self.names: list[str] = [request.request_id for request in requests]
        self._computed = np.array([request.num_computed_tokens for request in requests])
        # Number of steps in flight when the series of steady steps begins.
        self._under_way: int = requests[0].num_in_flight_tokens
        self._drawn = np.array([len(one._output_token_ids) for one in requests]) + self._under_way
        self._stops: set[int | None] = {None}
        for request in requests:
            params = request.sampling_params
            self._stops |= {*params.stop_token_ids, params.eos_token_id}
        # Number of steps before a request reaches its last token.
        self._room = min(
            min(one.num_prompt_tokens + one.max_tokens, max_model_len) - 1 - len(one._all_token_ids)
            for one in requests
        )
        places = self._computed % size
        # By step number modulo the block size: rows at a block's first token, and rows at its first
        # or last token.
        steps = [(places + step) % size for step in range(size)]
        self._firsts = [np.flatnonzero(place == 0) for place in steps]
        self._edges = [np.flatnonzero((place == 0) | (place == size - 1)) for place in steps]
        self._size = size
        self._num_handed = self._num_taken = 0
        self._kept: list[list[int]] = []  # buffered tokens of the last steps, by row
        # For each row, the numbers of scheduled and of taken steps that were already written to its
        # request.
        self._written = [(0, 0)] * len(requests)

    @staticmethod
    def fit(requests: Sequence[Any]) -> bool:
        """Whether all drew a token, none was preempted, and all have equally many in flight."""
        under_way = {request.num_in_flight_tokens for request in requests}
        return len(under_way) == 1 and all(
            request.prefill_stats is None and not request.num_preemptions for request in requests
        )

    @property
    def can_be_handed_out(self) -> bool:
        if self._is_async:
            return self._num_taken < self._room
        return not self._num_under_way

    @property
    def _num_under_way(self) -> int:
        return self._under_way + self._num_handed - self._num_taken

    def edges(self) -> list[tuple[int, Any, int]]:
        """Returns the rows that reach a block boundary in the next step and may need a change of
        the cache: row index, request (up to date), and number of computed tokens.

        A boundary is a block's first token, or its last token, after which vLLM can identify the
        block by its tokens. If the previous token is still in flight, that happens with the next
        block's first token.
        """
        of_step = self._firsts if self._num_under_way else self._edges
        rows: list[int] = of_step[self._num_handed % self._size].tolist()
        found = []
        for row in rows:
            self._write(row)
            request = self._requests[row]
            found.append((row, request, request.num_computed_tokens))
        return found

    def hand_out(self) -> tuple[list[int], list[int]]:
        """Counts a scheduled step; returns each row's numbers of computed and of drawn tokens."""
        number = self._num_handed
        self._num_handed += 1
        return (self._computed + number).tolist(), (self._drawn + number).tolist()

    def take(self, index: dict[str, int], sampled: Sequence[Sequence[int]]) -> list[int] | None:
        """Counts a step's tokens and returns them by row; None, without counting, if any is its
        request's last, or if a row does not have exactly one. `index` maps names to positions in
        `sampled`.
        """
        if self._num_taken >= self._room:
            return None
        try:
            tokens = [token for (token,) in (sampled[index[name]] for name in self.names)]
        except (KeyError, ValueError):
            return None
        if not self._stops.isdisjoint(tokens):
            return None
        self._kept.append(tokens)
        self._num_taken += 1
        if len(self._kept) >= MAX_BUFFERED:
            self.write()
        return tokens

    def write(self) -> None:
        for row in range(len(self._requests)):
            self._write(row)
        self._kept.clear()

    def _write(self, row: int) -> None:
        handed, taken = self._written[row]
        if (handed, taken) == (self._num_handed, self._num_taken):
            return
        request, num_taken = self._requests[row], self._num_taken - taken
        num_handed = self._num_handed - handed
        request.num_computed_tokens += num_handed
        request.num_in_flight_tokens += num_handed - num_taken
        if self._is_async:
            request.num_output_placeholders += num_handed - num_taken
        if num_taken:
            tokens = [step[row] for step in self._kept[len(self._kept) - num_taken :]]
            request._output_token_ids.extend(tokens)
            request._all_token_ids.extend(tokens)
            request.update_block_hashes()
        self._written[row] = self._num_handed, self._num_taken
