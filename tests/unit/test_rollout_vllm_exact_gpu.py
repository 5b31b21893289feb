"""Exact mode on GPUs: engine and trainer give vLLM's attention kernel the same lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from hybridrl.rollout.vllm.exact_gpu import _attend_unsplit, announced


@dataclass
class Metadata:
    max_query_len: int
    max_num_splits: int
    scheduler_metadata: torch.Tensor | None


def told(metadata: Metadata | None, head_size: int) -> Any:
    """Returns the metadata that reaches vLLM's `forward`."""
    found = []

    def forward(*arguments: Any, **_: Any) -> torch.Tensor:
        found.append(arguments[5])
        return torch.zeros(1)

    query = torch.zeros(3, 2, head_size)
    _attend_unsplit(forward, None, query, query, query, query, metadata)
    return found[0]


@pytest.mark.parametrize(("head_size", "longest"), [(64, 65), (128, 2)])
def test_decode_steps_announce_as_many_queries_as_a_short_prompt(
    head_size: int, longest: int
) -> None:
    given = Metadata(1, 0, torch.zeros(4))
    assert told(given, head_size) == Metadata(longest, 1, None)
    assert told(Metadata(longest, 1, None), head_size) == Metadata(longest, 1, None)
    assert announced(1, head_size) == announced(longest, head_size) == longest


def test_longer_prompts_announce_their_own_length() -> None:
    schedule = torch.zeros(4)
    kept = told(Metadata(100, 1, schedule), 64)
    assert kept.max_query_len == 100 and kept.scheduler_metadata is schedule
    assert told(Metadata(100, 0, schedule), 64) == Metadata(100, 1, None)
    assert told(None, 64) is None  # while vLLM measures its memory
