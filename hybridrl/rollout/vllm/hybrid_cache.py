"""Computes the size of vLLM's cache for models with recurrent layers.

All layers share one pool of blocks, each of which is a state of one recurrent layer, or the keys
and values of some positions of one attention layer. vLLM enlarges the blocks until they hold a
state (platforms/interface.py, `_align_hybrid_block_size`; 0.26, 0.32). Layers are divided into
groups of the same kind and size, and a request has its own blocks in each group
(v1/core/kv_cache_utils.py, `_get_kv_cache_groups_uniform_page_size`). No vLLM, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.models.family import ModelShape

# Number of positions of which a block on a GPU holds a multiple, as FlashAttention reports it.
GPU_LEAST_BLOCK_SIZE = 16
# Above this ratio of the numbers of layers of the two kinds, the smaller number is a group's size.
LARGE_RATIO = 1.5


@dataclass(frozen=True)
class HybridCache:
    """Sizes of vLLM's cache on one rank: positions in a block of an attention layer, bytes of one
    block in all layers of a group, and groups of each kind.
    """

    block_size: int
    block_bytes: int
    attention_groups: int
    recurrent_groups: int

    @staticmethod
    def of(
        shape: ModelShape, tp: int, least_block_size: int, cache_itemsize: int, itemsize: int
    ) -> HybridCache:
        """Returns the sizes for a model with attention and recurrent layers. A block holds a
        multiple of `least_block_size` positions. Item sizes are those of keys and values, and of
        the model.
        """
        assert shape.mixer is not None
        per_position = shape.cached_elements(tp) * cache_itemsize
        state = shape.mixer.state_bytes(tp, itemsize)
        block_size = least_block_size * -(-state // (least_block_size * per_position))
        counts = shape.num_attention_layers, len(shape.mixer.layers)
        group = max(counts)
        if 0 < LARGE_RATIO * min(counts) <= max(counts):
            group = min(counts)
        attention, recurrent = (-(-count // group) for count in counts)
        return HybridCache(block_size, block_size * per_position * group, attention, recurrent)

    def blocks_per_request(self, num_tokens: int, caches_prefixes: bool) -> int:
        """Returns the blocks of the longest request; cached prefixes need a second state."""
        states = 2 if caches_prefixes else 1
        positions = -(-num_tokens // self.block_size)
        return self.attention_groups * positions + self.recurrent_groups * states


def hybrid_request_bytes(
    shape: ModelShape, num_tokens: int, tp: int, cache_itemsize: int, itemsize: int
) -> int:
    """Returns the bytes of cache that a rank on a GPU needs for a request; see `EnginePackage`."""
    cache = HybridCache.of(shape, tp, GPU_LEAST_BLOCK_SIZE, cache_itemsize, itemsize)
    return cache.block_bytes * cache.blocks_per_request(num_tokens, caches_prefixes=True)
