"""Shortcuts through what vLLM does in Python for every token of every request.

A small model decodes as fast as the scheduler counts: with 0.5B parameters and 128 requests that
was two thirds of a step's time. Most tokens change nothing that it counts: the request's last block
of the KV cache has room for one more, and no block is complete. And the log-probabilities of a
step, one array, are cut up into an array a token. Owns both shortcuts; where a model's cache is of
another kind than one of full attention, vLLM's own way is taken.
"""

from __future__ import annotations

from typing import Any


def skip_what_stays(manager: Any) -> bool:
    """Makes vLLM's cache manager return at once where a token needs no block and completes none.

    Args:
        manager: a scheduler's `KVCacheManager`.

    Returns:
        Whether it does; not for caches of several kinds, sliding windows, or blocks over ranks.
    """
    managers = manager.coordinator.single_type_managers
    if [type(one).__name__ for one in managers] != ["FullAttentionManager"]:
        return False
    blocks = managers[0]
    size = blocks.block_size
    if size != blocks.kv_cache_spec.block_size or size != blocks.block_pool.hash_block_size:
        return False
    blocks_of, num_cached_of = blocks.req_to_blocks, blocks.num_cached_block
    allocate_slots, cache_blocks = manager.allocate_slots, manager.cache_blocks
    nothing = manager.empty_kv_cache_blocks

    def allocate(request: Any, num_new_tokens: int, **keywords: Any) -> Any:
        if num_new_tokens == 1 and not any(keywords.values()):
            total = request.num_computed_tokens + 1
            # Of a request that waits there are no blocks; a block that is complete is to be cached.
            if total % size and total <= size * len(blocks_of.get(request.request_id, ())):
                return nothing
        return allocate_slots(request, num_new_tokens, **keywords)

    def cache(request: Any, num_computed_tokens: int) -> None:
        if num_computed_tokens // size > num_cached_of.get(request.request_id, 0):
            cache_blocks(request, num_computed_tokens)

    manager.allocate_slots, manager.cache_blocks = allocate, cache
    return True


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
        if logprobs is not None:  # none where no request has got to its first token
            values = logprobs.logprobs[:, 0].tolist()
            self._of = dict(zip(found.req_ids, values, strict=True))
        return self._update(scheduler_output, found)
