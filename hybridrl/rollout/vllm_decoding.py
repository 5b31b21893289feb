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


def scheduler_fits(scheduler: Any) -> bool:
    """Whether a scheduler drafts no tokens and has no pipeline, adapters or connectors, and a cache
    of the kind that the shortcuts know, which needs no zeros.
    """
    parts = scheduler.connector, scheduler.ec_connector, scheduler.lora_config
    has_none = parts == (None,) * 3 and not scheduler.use_pp and scheduler.num_spec_tokens == 0
    return (
        has_none and not scheduler.needs_kv_cache_zeroing and cache_fits(scheduler.kv_cache_manager)
    )


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

    Where every running request decodes, scheduling a step changes little: each request has a token
    more that is computed, and one more under way. A drawn token that does not end its request is
    appended to it. Only that is done here. vLLM's own way is taken for all else: prompts, a cache
    that may be too small, a request's first and last token, requests that were preempted.
    The log-probabilities of a step are taken as the one array that they are, before vLLM makes
    arrays a token of them.

    Args:
        scheduler: of a live engine, whose requests ask for log-probabilities, and for no structure,
            images or check of repetition; its `schedule` and `update_from_output` are replaced.
        is_known: whether this version's scheduler was compared (vllm_version.py); of another one
            only log-probabilities are taken.
    """

    def __init__(self, scheduler: Any, is_known: bool) -> None:
        from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
        from vllm.v1.request import RequestStatus

        self._running_status = RequestStatus.RUNNING
        self._new_output, self._new_rows = SchedulerOutput.make_empty, CachedRequestData
        self._scheduler, self._manager = scheduler, scheduler.kv_cache_manager
        self._own_schedule, self._own_update = scheduler.schedule, scheduler.update_from_output
        self._logps: dict[str, float] = {}
        self._drawn: list[tuple[str, int, float]] = []
        # Whether a step is scheduled before the tokens of the one before it are known.
        self._is_async = bool(scheduler.scheduler_config.async_scheduling)
        self._counts_prefix = False  # 0.26 tells how many blocks all requests share
        self._is_known = is_known and scheduler_fits(scheduler)
        if self._is_known:
            blocks = self._manager.coordinator.single_type_managers[0]
            self._block_size, self._blocks_of = blocks.block_size, blocks.req_to_blocks
            scheduler.schedule = self._schedule
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
        self._counts_prefix = bool(output.num_common_prefix_blocks)
        return output

    def _decoding(self) -> list[tuple[Any, int, bool]]:
        """Returns the requests of this step with their computed tokens and whether the last block
        has room; none where not all of them decode, or it is not sure that the cache suffices.
        """
        scheduler, size, blocks_of = self._scheduler, self._block_size, self._blocks_of
        num_running, num_waiting = scheduler.get_request_counts()
        if num_waiting and num_running < scheduler.max_num_running_reqs:
            return []
        rows, num_lacking = [], 0
        for request in scheduler.running:
            total, under_way = request.num_computed_tokens + 1, request.num_output_placeholders
            last = min(request.num_prompt_tokens + request.max_tokens, scheduler.max_model_len)
            if under_way and total + 1 - under_way >= last:
                continue  # its last token is under way
            if len(request._all_token_ids) + under_way != total or request.is_prefill_chunk:
                return []
            held = len(blocks_of.get(request.request_id, ()))
            has_room = total % size != 0 and total <= held * size
            num_lacking += not has_room
            rows.append((request, total - 1, has_room))
        if num_lacking > self._manager.block_pool.get_num_free_blocks():
            return []
        if not scheduler.use_v2_model_runner:  # it is told the tokens of those that are new to it
            known = scheduler.prev_step_scheduled_req_ids
            if not all(request.request_id in known for request, _, _ in rows):
                return []
        return rows

    def _hand_out(self, rows: Sequence[tuple[Any, int, bool]]) -> Any:
        scheduler = self._scheduler
        scheduler.current_step += 1
        names: list[str] = []
        new_blocks: list[Any] = []
        num_computed: list[int] = []
        num_drawn: list[int] = []
        for request, computed, has_room in rows:
            new_blocks.append(None if has_room else self._allocate(request))
            names.append(request.request_id)
            num_computed.append(computed)
            num_drawn.append(len(request._output_token_ids) + request.num_output_placeholders)
            request.num_computed_tokens = computed + 1
            request.num_in_flight_tokens += 1
            if self._is_async:
                request.num_output_placeholders += 1
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
        self._logps = dict(zip(result.req_ids, logps, strict=True)) if logps else {}
        if not self._is_known or not logps:  # none: nothing was computed
            return self._own_update(scheduled, result)
        requests, index = self._scheduler.requests, result.req_id_to_index
        others: dict[str, int] = {}
        for name, count in scheduled.num_scheduled_tokens.items():
            request, row = requests.get(name), index[name]
            tokens = result.sampled_token_ids[row]  # none of a prompt's part
            is_plain = request is not None and count == len(tokens) == 1
            if is_plain and self._goes_on(request, tokens[0]):
                self._append(request, tokens[0])
                self._drawn.append((name, tokens[0], logps[row]))
            else:
                others[name] = count
        rest = copy(scheduled)
        rest.num_scheduled_tokens = others
        return self._own_update(rest, result)

    def _goes_on(self, request: Any, token: int) -> bool:
        """Whether a token is neither its request's first nor its last, and nothing was undone."""
        params = request.sampling_params
        return (
            request.status is self._running_status
            and request.num_preemptions == 0  # the versions differ in what becomes of its tokens
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
        if len(request._all_token_ids) % self._block_size == 0:
            request.update_block_hashes()
        if self._is_async:
            request.num_output_placeholders -= 1
