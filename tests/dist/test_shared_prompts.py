"""Samples that hold their prompt once, against samples that hold it each.

The checks are in shared_prompts_worker.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from tiny_models import HYBRID_EXPERTS, save_tiny_models

WORKER = str(Path(__file__).with_name("shared_prompts_worker.py"))
NAMES = ("llama", "windowed", "qwen3", "olmo")  # windowed: qwen2, and windows


@pytest.mark.dist
def test_shared_prompts_give_the_gradients_of_unshared_ones(tmp_path: Path) -> None:
    save_tiny_models(tmp_path, NAMES)
    layouts = ("2,1,1,1", "1,2,1,1", "1,1,1,1,full", "1,2,2,1,selective", "1,1,1,2")
    run_ranks(2, WORKER, [str(tmp_path), ",".join(NAMES), *layouts], timeout_s=300)


@pytest.mark.dist
def test_shared_prompts_continue_recurrent_states(tmp_path: Path, is_full: bool) -> None:
    """The state at the end of a prompt is where each of its samples begins."""
    others = ("qwen3_5_text", *HYBRID_EXPERTS) if is_full else ()
    # One pipeline stage has only recurrent layers, the other only attention.
    names = ("qwen3_5_halves", *others)
    save_tiny_models(tmp_path, names)
    layouts = ("2,1,1,1", "1,2,1,1", *(("1,1,1,1,full", "1,2,2,1,selective") if is_full else ()))
    run_ranks(2, WORKER, [str(tmp_path), ",".join(names), *layouts], timeout_s=500)


@pytest.mark.dist
def test_shared_prompts_of_experts_give_the_gradients_of_unshared_ones(
    tmp_path: Path, is_full: bool
) -> None:
    names = ("deepseek_v3", "gpt_oss", *(("qwen3_moe",) if is_full else ()))
    layouts = ("2,1,1,1", "1,1,1,2", *(("1,1,1,1,full",) if is_full else ()))
    save_tiny_models(tmp_path, names)
    run_ranks(2, WORKER, [str(tmp_path), ",".join(names), *layouts], timeout_s=300)
