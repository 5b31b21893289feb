"""Shortcuts through what vLLM does in Python for every token of every request.

A small model decodes as fast as the scheduler counts: with 0.5B parameters and 128 requests that
was two thirds of a step's time. Most tokens change nothing that it counts: the request's last block
of the KV cache has room for one more, and no block is complete. And the log-probabilities of a
step, one array, are cut up into an array a token. Owns both shortcuts; where a model's cache is of
another kind than one of full attention, vLLM's own way is taken.
"""

from __future__ import annotations

from typing import Any


class CacheShortcut:
    """Answers for vLLM's cache manager where a token needs no block and completes none.

    Args:
        manager: a scheduler's `KVCacheManager`, whose methods are replaced; vLLM's own are called
            wherever something changes.
    """

    def __init__(self, manager: Any) -> None:
        blocks = manager.coordinator.single_type_managers[0]
        self._size, self._blocks_of = blocks.block_size, blocks.req_to_blocks
        self._num_cached_of = blocks.num_cached_block
        self._allocate, self._cache = manager.allocate_slots, manager.cache_blocks
        self._nothing = manager.empty_kv_cache_blocks
        manager.allocate_slots, manager.cache_blocks = self._allocate_slots, self._cache_blocks

    @staticmethod
    def fits(manager: Any) -> bool:
        """Whether a cache is of the kind that this knows: of full attention alone, in blocks that
        are not cut over ranks.
        """
        managers = manager.coordinator.single_type_managers
        if [type(one).__name__ for one in managers] != ["FullAttentionManager"]:
            return False
        sizes = managers[0].kv_cache_spec.block_size, managers[0].block_pool.hash_block_size
        return sizes == (managers[0].block_size,) * 2

    def has_room(self, request: Any, num_new_tokens: int) -> bool:
        """Whether a request's last block has room for its next token, and for more after it."""
        total = request.num_computed_tokens + 1
        held = len(self._blocks_of.get(request.request_id, ()))  # none of a request that waits
        return num_new_tokens == 1 and total % self._size != 0 and total <= held * self._size

    def is_cached(self, request: Any, num_tokens: int) -> bool:
        """Whether all blocks that `num_tokens` of a request fill are found by others already."""
        return num_tokens // self._size <= int(self._num_cached_of.get(request.request_id, 0))

    def _allocate_slots(self, request: Any, num_new_tokens: int, **keywords: Any) -> Any:
        if self.has_room(request, num_new_tokens) and not any(keywords.values()):
            return self._nothing
        return self._allocate(request, num_new_tokens, **keywords)

    def _cache_blocks(self, request: Any, num_computed_tokens: int) -> None:
        if not self.is_cached(request, num_computed_tokens):
            self._cache(request, num_computed_tokens)


class SampledLogprobs:
    """The log-probabilities of the tokens that a step has drawn, one of each request.

    Taken from what vLLM's scheduler is given, before it makes arrays a token of them.

    Args:
        scheduler: of a live engine, which drafts no tokens; its `update_from_output` is replaced.
    """

    def __init__(self, scheduler: Any) -> None:
        self._update = scheduler.update_from_output
        self._of: dict[str, float] = {}
        scheduler.update_from_output = self._take

    def __getitem__(self, request_id: str) -> float:
        """Returns the one of a request, by vLLM's name for it; of the last step."""
        return self._of[request_id]

    def _take(self, scheduler_output: Any, found: Any) -> Any:
        logprobs, found.logprobs = found.logprobs, None
        self._of = {}  # none where nothing was computed
        if logprobs is not None:
            values = logprobs.logprobs[:, 0].tolist()
            self._of = dict(zip(found.req_ids, values, strict=True))
        return self._update(scheduler_output, found)
