"""Frozen parts: they keep every bit, and what is trained learns as in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from tiny_models import save_tiny_models

WORKER = str(Path(__file__).with_name("trainable_worker.py"))


@pytest.mark.dist
@pytest.mark.parametrize("cases", ["usual", pytest.param("rare", marks=pytest.mark.full)])
def test_frozen_parts_keep_their_weights_and_the_others_learn(cases: str, tmp_path: Path) -> None:
    """Gradients are transformers', memory is the plan's, and checkpoints continue bit for bit."""
    save_tiny_models(tmp_path, ("qwen2", "qwen3", "llama", "qwen3_moe"))
    run_ranks(2, WORKER, [str(tmp_path), cases], timeout_s=400)
