"""Shortcuts for the Python code that vLLM runs for every token of every request.

With 0.5B parameters and 128 requests, vLLM's scheduler took a third of each decode step, and the
GPU was idle for more than half of that time (docs/adr/0014-vllm-scheduler.md). For most tokens
almost nothing changes: the last block has room, no block is completed, and no request begins or
ends. The shortcuts apply only to caches for full attention and to vLLM versions whose scheduler was
compared; otherwise vLLM's own code runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

import numpy as np

from hybridrl.contracts.blobs import Array

# Maximum number of steps whose tokens are buffered before they are written to the requests.
MAX_BUFFERED = 256

Likely = Sequence[tuple[Array, Array]]
"""For some tokens, the arrays of contracts/likely_tokens.py, `likely_entries`."""


def scheduler_fits(scheduler: Any) -> bool:
    """Whether the shortcuts support a scheduler: no draft tokens, pipeline or connectors, and a
    supported cache that needs no zeroing. Adapters do not matter, because they never make a request
    wait.
    """
    parts = scheduler.connector, scheduler.ec_connector
    has_none = parts == (None,) * 2 and not scheduler.use_pp and scheduler.num_spec_tokens == 0
    has_plain_cache = not scheduler.needs_kv_cache_zeroing
    return has_none and has_plain_cache and cache_fits(scheduler.kv_cache_manager)


def cache_fits(manager: Any) -> bool:
    """Whether a `KVCacheManager` has only full attention, in blocks not split across ranks."""
    managers = manager.coordinator.single_type_managers
    if [type(one).__name__ for one in managers] != ["FullAttentionManager"]:
        return False
    sizes = managers[0].kv_cache_spec.block_size, managers[0].block_pool.hash_block_size
    return sizes == (managers[0].block_size,) * 2


class StepTokens(NamedTuple):
    """Tokens drawn in one step, with vLLM's names of the requests."""

    names: list[str]
    tokens: list[int]
    logps: list[float]
    likely: Likely  # of each token; empty if no running request records likely tokens


class StepBuffer:
    """Buffers steps with the same requests, so that each request's tokens are appended together."""

    def __init__(self) -> None:
        self._steps: list[StepTokens] = []

    def fits(self, step: StepTokens) -> bool:
        return not self._steps or self._steps[-1].names == step.names

    def add(self, step: StepTokens) -> None:
        self._steps.append(step)

    def take(self) -> Iterator[tuple[str, tuple[int, ...], tuple[float, ...], Likely]]:
        """Yields each request's name, tokens, log-probabilities and likely tokens, and empties the
        buffer.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return
        tokens = zip(*(step.tokens for step in steps), strict=True)
        logps = zip(*(step.logps for step in steps), strict=True)
        for place, (name, own, own_logps) in enumerate(
            zip(steps[0].names, tokens, logps, strict=True)
        ):
            yield name, own, own_logps, [step.likely[place] for step in steps if step.likely]


class SteadyRows:
    """All running requests, which decode together (`fit`), in the scheduler's order.

    While none begins, ends or leaves, each step changes the same counters of every request by one.
    They are counted for all requests together, and written before vLLM reads them: to a single
    request at a block boundary of the KV cache, and to all when the series of steps ends.

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


class DecodingSteps:
    """Replaces a live scheduler's steps by faster ones, and collects the tokens that they draw.

    While every running request decodes, each step adds one computed token and one token in flight
    to each request, and appends each drawn token that does not end its request. vLLM's own code
    handles all other cases: prompts, a cache that may be too small, a request's first and last
    token, and preempted requests. Log-probabilities are read as one array.

    Args:
        scheduler: Scheduler of a live engine whose requests need log-probabilities, and no
            structured output, images or repetition checks. Its `schedule`, `update_from_output` and
            `finish_requests` are replaced.
        is_known: Whether this version's scheduler was compared (vllm/version.py); otherwise only
            log-probabilities are read.
    """

    def __init__(self, scheduler: Any, is_known: bool) -> None:
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
        from vllm.v1.request import RequestStatus

        self._running_status = RequestStatus.RUNNING
        self._new_output, self._new_rows = SchedulerOutput.make_empty, CachedRequestData
        self._scheduler, self._manager = scheduler, scheduler.kv_cache_manager
        self._own_schedule, self._own_update = scheduler.schedule, scheduler.update_from_output
        self._logps: dict[str, float] = {}
        self._likely: dict[str, tuple[Array, Array]] = {}
        self._drawn: list[StepTokens] = []
        self._steady: SteadyRows | None = None
        self._decoded: list[
            str
        ] = []  # request names in the last step in which all requests decoded
        # Whether a step is scheduled before the previous step's tokens are known.
        self.is_async = bool(scheduler.scheduler_config.async_scheduling)
        self._counts_prefix = False  # whether a step counts shared blocks, as in 0.26
        self._is_known = is_known and scheduler_fits(scheduler)
        if self._is_known:
            blocks = self._manager.coordinator.single_type_managers[0]
            self._block_size, self._blocks_of = blocks.block_size, blocks.req_to_blocks
            scheduler.schedule = self._schedule
            self._own_finish, scheduler.finish_requests = scheduler.finish_requests, self._finish
        scheduler.update_from_output = self._update_from_output

    def take_steps(self) -> list[StepTokens]:
        """Returns new tokens that vLLM's own output lacks: all but a request's first and last."""
        drawn, self._drawn = self._drawn, []
        return drawn

    def logp(self, request_id: str) -> float:
        return self._logps[request_id]

    def likely(self, request_id: str) -> Likely:
        return [self._likely[request_id]] if request_id in self._likely else []

    def write(self) -> None:
        """Brings vLLM's requests up to date; must be called before they are read."""
        if self._steady is not None:
            self._steady.write()

    def _leave_steady(self) -> None:
        self.write()
        self._steady = None

    def _finish(self, *arguments: Any, **keywords: Any) -> Any:
        self._leave_steady()
        return self._own_finish(*arguments, **keywords)

    def _schedule(self, *arguments: Any, **keywords: Any) -> Any:
        if self._steady is not None:
            if (output := self._hand_out_steady(self._steady)) is not None:
                return output
            self._leave_steady()
        rows = self._decoding()
        if rows:
            output = self._hand_out(rows)
            self._begin_steady([request for request, _, _ in rows])
            return output
        output = self._own_schedule(*arguments, **keywords)
        self._counts_prefix = bool(output.num_common_prefix_blocks)
        return output

    def _begin_steady(self, requests: Sequence[Any]) -> None:
        """Starts `SteadyRows` if two steps in a row decoded all requests; sooner, it costs time."""
        names, before = [request.request_id for request in requests], self._decoded
        self._decoded = names
        is_all = len(requests) == len(self._scheduler.running) and self._block_size > 2
        if names == before and is_all and SteadyRows.fit(requests):
            most = self._scheduler.max_model_len
            self._steady = SteadyRows(requests, self._block_size, most, self.is_async)

    def _decoding(self) -> list[tuple[Any, int, bool]]:
        """Returns this step's requests, each with its number of computed tokens and whether its
        last block has room; [] if a request does not decode, or the cache may be too small.
        """
        scheduler, size, blocks_of = self._scheduler, self._block_size, self._blocks_of
        num_running, num_waiting = scheduler.get_request_counts()
        if num_waiting and num_running < scheduler.max_num_running_reqs:
            return []
        rows, num_lacking, most = [], 0, scheduler.max_model_len
        for request in scheduler.running:
            computed, under_way = request.num_computed_tokens, request.num_output_placeholders
            if under_way:
                last = min(request.num_prompt_tokens + request.max_tokens, most)
                if computed + 2 - under_way >= last:
                    continue  # the request's last token is in flight
            if len(request._all_token_ids) + under_way != computed + 1 or request.is_prefill_chunk:
                return []
            # A block's first token may need a new block; its last token completes the block.
            place = computed % size
            if place == 0 or place == size - 1:
                held = len(blocks_of.get(request.request_id, ()))
                has_room = place == 0 and size > 1 and computed < held * size
                num_lacking += not has_room
            else:
                has_room = True
            rows.append((request, computed, has_room))
        if num_lacking > self._manager.block_pool.get_num_free_blocks():
            return []
        # vLLM's first model runner needs the tokens of requests that were not in the last step.
        if not scheduler.use_v2_model_runner:
            known = scheduler.prev_step_scheduled_req_ids
            if not all(request.request_id in known for request, _, _ in rows):
                return []
        return rows

    def _hand_out_steady(self, steady: SteadyRows) -> Any:
        """Schedules a step of the steady rows; None if they are no longer steady or lack cache."""
        scheduler, size, blocks_of = self._scheduler, self._block_size, self._blocks_of
        num_running, num_waiting = scheduler.get_request_counts()
        if num_waiting and num_running < scheduler.max_num_running_reqs:
            return None
        if not steady.can_be_handed_out:
            return None
        lacking = [
            (row, request)
            for row, request, computed in steady.edges()
            if computed % size or computed >= size * len(blocks_of.get(request.request_id, ()))
        ]
        if len(lacking) > self._manager.block_pool.get_num_free_blocks():
            return None
        new_blocks: list[Any] = [None] * len(steady.names)
        for row, request in lacking:
            new_blocks[row] = self._allocate(request)
        return self._output(list(steady.names), new_blocks, *steady.hand_out())

    def _hand_out(self, rows: Sequence[tuple[Any, int, bool]]) -> Any:
        is_async = self.is_async
        names = [request.request_id for request, _, _ in rows]
        new_blocks: list[Any] = []
        num_drawn: list[int] = []
        for request, computed, has_room in rows:
            new_blocks.append(None if has_room else self._allocate(request))
            under_way = request.num_output_placeholders
            num_drawn.append(len(request._output_token_ids) + under_way)
            request.num_computed_tokens = computed + 1
            request.num_in_flight_tokens += 1
            if is_async:
                request.num_output_placeholders = under_way + 1
        return self._output(names, new_blocks, [computed for _, computed, _ in rows], num_drawn)

    def _output(
        self,
        names: list[str],
        new_blocks: list[Any],
        num_computed: list[int],
        num_drawn: list[int],
    ) -> Any:
        scheduler = self._scheduler
        scheduler.current_step += 1
        output = self._new_output()
        output.scheduled_cached_reqs = self._new_rows(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=new_blocks,
            num_computed_tokens=num_computed,
            num_output_tokens=num_drawn,
        )
        output.num_scheduled_tokens = dict.fromkeys(names, 1)
        output.total_num_scheduled_tokens = len(names)
        output.finished_req_ids, scheduler.finished_req_ids = scheduler.finished_req_ids, set()
        output.preempted_req_ids = set()
        if not scheduler.use_v2_model_runner:
            scheduler.prev_step_scheduled_req_ids = set(names)
        if self._counts_prefix:
            first = scheduler.running[0].request_id
            output.num_common_prefix_blocks = self._manager.get_num_common_prefix_blocks(first)
        return output

    def _allocate(self, request: Any) -> Any:
        blocks = self._manager.allocate_slots(request, 1)
        if blocks is None:
            raise RuntimeError(f"vLLM's cache has no block for request {request.request_id}")
        return blocks.get_block_ids(allow_none=True)

    def _update_from_output(self, scheduled: Any, result: Any) -> Any:
        logprobs, result.logprobs = result.logprobs, None
        logps = [] if logprobs is None else logprobs.logprobs[:, 0].tolist()
        likely: list[tuple[Array, Array]] = []
        if logprobs is not None and logprobs.logprobs.shape[1] > 1:
            likely = [*zip(logprobs.logprob_token_ids, logprobs.logprobs, strict=True)]
        if not self._is_known or not logps:  # empty if nothing was computed
            self._logps = dict(zip(result.req_ids, logps, strict=True)) if logps else {}
            self._likely = dict(zip(result.req_ids, likely, strict=False))
            return self._own_update(scheduled, result)
        counts, index = scheduled.num_scheduled_tokens, result.req_id_to_index
        others = {}
        if not self._take_steady(counts, result, logps, likely):
            self._leave_steady()
            others = self._take_plain(counts, result, logps, likely)
        self._logps = {name: logps[index[name]] for name in others}
        self._likely = {name: likely[index[name]] for name in others if likely}
        rest = copy(scheduled)
        rest.num_scheduled_tokens = others
        return self._own_update(rest, result)

    def _take_steady(
        self, counts: Mapping[str, int], result: Any, logps: Sequence[float], likely: Likely
    ) -> bool:
        """Reads the tokens of a step if it consists of the steady rows; returns whether it does."""
        steady, index = self._steady, result.req_id_to_index
        if (
            steady is None
            or len(counts) != len(steady.names)
            or sum(counts.values()) != len(counts)
        ):
            return False
        tokens = steady.take(index, result.sampled_token_ids)
        if tokens is None:
            return False
        rows = [index[name] for name in steady.names]
        own = [likely[row] for row in rows if likely]
        self._drawn.append(StepTokens(steady.names, tokens, [logps[row] for row in rows], own))
        return True

    def _take_plain(
        self, counts: Mapping[str, int], result: Any, logps: Sequence[float], likely: Likely
    ) -> dict[str, int]:
        """Appends each token that is neither its request's first nor its last, if the request was
        not preempted. Returns the other requests with their numbers of tokens.
        """
        requests, index = self._scheduler.requests, result.req_id_to_index
        sampled, most = result.sampled_token_ids, self._scheduler.max_model_len
        running, size, is_async = self._running_status, self._block_size, self.is_async
        others: dict[str, int] = {}
        own_likely: list[tuple[Array, Array]] = []
        drawn = StepTokens([], [], [], own_likely)
        for name, count in counts.items():
            row = index[name]
            tokens, request = sampled[row], requests.get(name)  # a prompt chunk yields no token
            if request is None or count != 1 or len(tokens) != 1:
                others[name] = count
                continue
            token, params = tokens[0], request.sampling_params
            own, whole = request._output_token_ids, request._all_token_ids
            if (
                token in params.stop_token_ids
                or token == params.eos_token_id
                or len(own) + 1 >= request.max_tokens
                or len(whole) + 1 >= most
                or request.status is not running
                or request.num_preemptions  # vLLM's versions differ for preempted requests
                or request.prefill_stats is not None  # vLLM's own code reports these stats
            ):
                others[name] = count
                continue
            request.num_in_flight_tokens -= 1
            own.append(token)
            whole.append(token)
            if len(whole) % size == 0:
                request.update_block_hashes()
            if is_async:
                request.num_output_placeholders -= 1
            drawn.names.append(name)
            drawn.tokens.append(token)
            drawn.logps.append(logps[row])
            if likely:
                own_likely.append(likely[row])
        if drawn.names:
            self._drawn.append(drawn)
        return others
