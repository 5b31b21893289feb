"""Sampling replay and score centering in every kind of layout, against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from tiny_models import save_tiny_models

WORKER = str(Path(__file__).with_name("likely_worker.py"))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, ("llama,2,1,1", "qwen3,1,2,1", "qwen3,1,1,2")),
        pytest.param(1, ("llama,1,1,1", "qwen3,1,1,1"), marks=pytest.mark.full),
        pytest.param(2, ("qwen3,2,1,1", "llama,1,2,1"), marks=pytest.mark.full),
        pytest.param(4, ("llama,2,2,1", "qwen3,2,1,2"), marks=pytest.mark.full),
    ],
)
def test_likely_tokens_have_the_statistics_of_transformers(
    world: int, cases: tuple[str, ...], tmp_path: Path
) -> None:
    """Tied (llama) and untied output weights, shared prompts, and sequences packed together."""
    save_tiny_models(tmp_path, ("llama", "qwen3"))
    run_ranks(world, WORKER, [str(tmp_path), *cases], timeout_s=300)
