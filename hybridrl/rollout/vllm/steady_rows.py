"""Requests of vLLM that all decode, a token a step, until one of them begins, ends or is taken out.

Between such events a step changes the same few numbers of every request by one. They are counted
here for all of them at once, and written into vLLM's requests when somebody is to read these: at a
request's edges of blocks of the KV cache, and for all where the run of steps ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

# Steps whose tokens are kept before they are written into all requests.
MOST_KEPT = 256


class SteadyRows:
    """Rows of requests that decode in step: all that run, in the scheduler's order, which `fit`.
    `size` is the tokens of a block of the cache, at least 3; `is_async`: a step is scheduled before
    the tokens of the one before it are known.
    """

    def __init__(
        self, requests: Sequence[Any], size: int, max_model_len: int, is_async: bool
    ) -> None:
        self._requests, self._is_async = list(requests), is_async
        self.names: list[str] = [request.request_id for request in requests]
        self._computed = np.array([request.num_computed_tokens for request in requests])
        # Steps that were scheduled before and whose tokens are yet to come.
        self._under_way: int = requests[0].num_in_flight_tokens
        self._drawn = np.array([len(one._output_token_ids) for one in requests]) + self._under_way
        self._stops: set[int | None] = {None}
        for request in requests:
            params = request.sampling_params
            self._stops |= {*params.stop_token_ids, params.eos_token_id}
        # Tokens that can be taken until one is a request's last.
        self._room = min(
            min(one.num_prompt_tokens + one.max_tokens, max_model_len) - 1 - len(one._all_token_ids)
            for one in requests
        )
        places = self._computed % size
        # By the number of a step, modulo a block: rows at a block's first token; at either edge.
        steps = [(places + step) % size for step in range(size)]
        self._firsts = [np.flatnonzero(place == 0) for place in steps]
        self._edges = [np.flatnonzero((place == 0) | (place == size - 1)) for place in steps]
        self._size = size
        self._num_handed = self._num_taken = 0
        self._kept: list[list[int]] = []  # tokens of the last steps that were taken, by row
        # Of each row, steps that were handed out and taken and are in its request.
        self._written = [(0, 0)] * len(requests)

    @staticmethod
    def fit(requests: Sequence[Any]) -> bool:
        """Whether requests that decode may be rows: each has drawn a token, none was preempted, and
        the same steps are under way for all.
        """
        under_way = {request.num_in_flight_tokens for request in requests}
        return len(under_way) == 1 and all(
            request.prefill_stats is None and not request.num_preemptions for request in requests
        )

    @property
    def can_be_handed_out(self) -> bool:
        """Whether the next step may be of all rows again."""
        if self._is_async:
            return self._num_taken < self._room
        return not self._num_under_way

    @property
    def _num_under_way(self) -> int:
        return self._under_way + self._num_handed - self._num_taken

    def edges(self) -> list[tuple[int, Any, int]]:
        """Returns the rows that the next step finds at an edge of a block, where the cache may have
        to be told: number, request, which is written, and tokens that are computed.

        That is a block's first token; and its last one, with which it is known by its tokens, but
        not where the token before is under way: then that comes with the next block's first.
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
        """Takes a step for handed out; returns how many tokens of each row were computed before it,
        and how many it had drawn.
        """
        number = self._num_handed
        self._num_handed += 1
        return (self._computed + number).tolist(), (self._drawn + number).tolist()

    def take(self, index: dict[str, int], sampled: Sequence[Sequence[int]]) -> list[int] | None:
        """Takes a step's tokens and returns them by row; None, and takes none, where one is its
        request's last, or some row has not exactly one. `index` has the places of names in
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
        if len(self._kept) >= MOST_KEPT:
            self.write()
        return tokens

    def write(self) -> None:
        """Writes all that is kept into vLLM's requests."""
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
