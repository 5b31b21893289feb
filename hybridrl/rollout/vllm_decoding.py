"""Shortcuts through what vLLM does in Python for every token of every request.

A small model decodes as fast as Python counts: with 0.5B parameters and 128 requests vLLM's
scheduler took a third of a step's time, and the GPU waited for more than half of it. Most tokens
change next to nothing: the request's last block of the KV cache has room for one more, no block is
complete, no request begins or ends. Owns these shortcuts; where a model's cache is of another kind
than one of full attention, or vLLM's version is not known, vLLM's own way is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any


def cache_fits(manager: Any) -> bool:
    """Whether a `KVCacheManager` has a cache of the kind that the shortcuts know: of full attention
    alone, in blocks that are not cut over ranks.
    """
    managers = manager.coordinator.single_type_managers
    if [type(one).__name__ for one in managers] != ["FullAttentionManager"]:
        return False
    sizes = managers[0].kv_cache_spec.block_size, managers[0].block_pool.hash_block_size
    return sizes == (managers[0].block_size,) * 2


class DecodingSteps:
    """What a live scheduler does in a step, and the tokens that the step has drawn.

    Of a step in which every running request decodes, only what it changes is done: a token more is
    computed of each request, and under way; and of a drawn token that does not end its request,
    which gets it. vLLM's own way is taken for all else: prompts, a cache that may be too small, a
    request's first and last token, requests that were preempted.
    The log-probabilities of a step are taken as the one array that they are, before vLLM makes
    arrays a token of them.

    Args:
        scheduler: of a live engine that drafts no tokens and has no pipeline, adapters or
            connectors; its `schedule` and `update_from_output` are replaced.
        is_known: whether this version's scheduler was compared (vllm_version.py); of another one
            only log-probabilities are taken.
    """

    def __init__(self, scheduler: Any, is_known: bool) -> None:
        from vllm.v1.request import RequestStatus

        self._running_status = RequestStatus.RUNNING
        self._scheduler, self._manager = scheduler, scheduler.kv_cache_manager
        self._own_schedule, self._own_update = scheduler.schedule, scheduler.update_from_output
        self._logps: dict[str, float] = {}
        self._drawn: list[tuple[str, int, float]] = []
        self._counts_prefix = False
        self._size = 0  # of a block; 0: every step is vLLM's
        if is_known and cache_fits(self._manager):
            blocks = self._manager.coordinator.single_type_managers[0]
            self._size, self._blocks_of = blocks.block_size, blocks.req_to_blocks
            scheduler.schedule = self._schedule
        # Of requests of a step whose tokens are still on the GPU when the next one is scheduled.
        self._is_async = bool(scheduler.scheduler_config.async_scheduling)
        scheduler.update_from_output = self._update_from_output

    def drawn(self) -> list[tuple[str, int, float]]:
        """Returns, once, the tokens that vLLM's output does not have, with their log-probabilities,
        each by vLLM's name for its request; of no request the last.
        """
        drawn, self._drawn = self._drawn, []
        return drawn

    def logp(self, request_id: str) -> float:
        """Returns the log-probability of the token of a request in vLLM's last output."""
        return self._logps[request_id]

    def _schedule(self, *arguments: Any, **keywords: Any) -> Any:
        rows = self._decoding()
        if rows:
            return self._hand_out(rows)
        output = self._own_schedule(*arguments, **keywords)
        self._counts_prefix = bool(output.num_common_prefix_blocks)  # of old versions
        return output

    def _decoding(self) -> list[tuple[Any, int, bool]]:
        """Returns the requests of this step with their computed tokens and whether the last block
        has room; none where not all of them decode, or it is not sure that the cache suffices.
        """
        scheduler, size, blocks_of = self._scheduler, self._size, self._blocks_of
        num_running, num_waiting = scheduler.get_request_counts()
        if num_waiting and num_running < scheduler.max_num_running_reqs:
            return []
        rows, num_lacking = [], 0
        for request in scheduler.running:
            computed, under_way = request.num_computed_tokens, request.num_output_placeholders
            last = request.num_prompt_tokens + request.max_tokens
            if under_way and computed + 2 - under_way >= last:
                continue  # its last token is under way
            if len(request._all_token_ids) + under_way != computed + 1 or request.is_prefill_chunk:
                return []
            total = computed + 1
            held = len(blocks_of.get(request.request_id, ()))
            has_room = total % size != 0 and total <= held * size
            num_lacking += not has_room
            rows.append((request, computed, has_room))
        if num_lacking > self._manager.block_pool.get_num_free_blocks():
            return []
        if not scheduler.use_v2_model_runner:  # it wants to know who was not in the step before
            names = {request.request_id for request, _, _ in rows}
            if not scheduler.prev_step_scheduled_req_ids >= names:
                return []
            scheduler.prev_step_scheduled_req_ids = names
        return rows

    def _hand_out(self, rows: Sequence[tuple[Any, int, bool]]) -> Any:
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

        scheduler, manager = self._scheduler, self._manager
        scheduler.current_step += 1
        manager.new_step_starts()
        names: list[str] = []
        new_blocks: list[Any] = []
        num_computed: list[int] = []
        num_drawn: list[int] = []
        for request, computed, has_room in rows:
            found = None if has_room else manager.allocate_slots(request, 1)
            new_blocks.append(None if found is None else found.get_block_ids(allow_none=True))
            names.append(request.request_id)
            num_computed.append(computed)
            num_drawn.append(len(request._output_token_ids) + request.num_output_placeholders)
            request.num_computed_tokens = computed + 1
            request.num_in_flight_tokens += 1
            if self._is_async:
                request.num_output_placeholders += 1
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = CachedRequestData(
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
        preempted, scheduler.reset_preempted_req_ids = scheduler.reset_preempted_req_ids, set()
        output.preempted_req_ids = preempted
        output.new_block_ids_to_zero = scheduler._get_new_block_ids_to_zero()
        if self._counts_prefix:
            first = scheduler.running[0].request_id
            output.num_common_prefix_blocks = manager.get_num_common_prefix_blocks(first)
        return output

    def _update_from_output(self, scheduled: Any, found: Any) -> Any:
        logprobs, found.logprobs = found.logprobs, None
        values = [] if logprobs is None else logprobs.logprobs[:, 0].tolist()
        self._logps = dict(zip(found.req_ids, values, strict=True)) if values else {}
        if not self._size or not values:
            return self._own_update(scheduled, found)
        rows, tokens = found.req_id_to_index, found.sampled_token_ids
        others: dict[str, int] = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            request, row = self._scheduler.requests.get(name), rows[name]
            (token,) = tokens[row] or (None,)
            if request is None or token is None or not self._goes_on(request, token):
                others[name] = count
            else:
                self._append(request, token)
                self._drawn.append((name, token, values[row]))
        rest = copy(scheduled)
        rest.num_scheduled_tokens = others
        return self._own_update(rest, found)

    def _goes_on(self, request: Any, token: int) -> bool:
        """Whether a token is neither its request's first nor its last, and nothing was undone."""
        params = request.sampling_params
        return (
            request.status is self._running_status
            and request.num_preemptions == 0  # tokens from before it may be under way
            and request.prefill_stats is None  # told with the first token
            and token not in params.stop_token_ids
            and token != params.eos_token_id
            and len(request._output_token_ids) + 1 < request.max_tokens
            and len(request._all_token_ids) + 1 < self._scheduler.max_model_len
        )

    def _append(self, request: Any, token: int) -> None:
        request.num_in_flight_tokens -= 1
        request._output_token_ids.append(token)
        request._all_token_ids.append(token)
        if len(request._all_token_ids) % self._size == 0:
            request.update_block_hashes()
        if self._is_async:
            request.num_output_placeholders -= 1
            computed = request.num_computed_tokens - request.num_output_placeholders
            if computed % self._size == 0:
                self._manager.cache_blocks(request, computed)
