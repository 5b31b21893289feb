"""Which caches of vLLM the shortcuts are for; what they do: contracts/test_vllm_engine.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hybridrl.rollout.vllm.decoding import cache_fits


def cache(kind: str, block_size: int = 64, spec_size: int = 64, hash_size: int = 64) -> Any:
    spec = SimpleNamespace(block_size=spec_size)
    pool = SimpleNamespace(hash_block_size=hash_size)
    fields = {"block_size": block_size, "kv_cache_spec": spec, "block_pool": pool}
    return type(kind, (), fields)()


FULL = cache("FullAttentionManager")
SLIDING = cache("SlidingWindowManager")


@pytest.mark.parametrize(
    ("managers", "fits"),
    [
        ([FULL], True),
        ([SLIDING], False),
        ([FULL, SLIDING], False),
        ([FULL, FULL], False),
        ([], False),
        ([cache("FullAttentionManager", block_size=128)], False),  # cut over two ranks
        ([cache("FullAttentionManager", hash_size=16)], False),  # parts of blocks are cached
    ],
)
def test_shortcuts_are_for_whole_blocks_of_full_attention_alone(
    managers: list[Any], fits: bool
) -> None:
    coordinator = SimpleNamespace(single_type_managers=managers)
    assert cache_fits(SimpleNamespace(coordinator=coordinator)) is fits
