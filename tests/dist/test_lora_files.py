"""Adapters in PEFT directories and checkpoints, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from tiny_models import save_tiny_models

WORKER = str(Path(__file__).with_name("lora_worker.py"))


@pytest.mark.dist
def test_peft_directory_comes_back_bitwise_and_checkpoints_move(tmp_path: Path) -> None:
    """TP2 and PP2, each of which continues from a checkpoint of the other."""
    save_tiny_models(tmp_path, ("qwen2", "phi3"))
    run_ranks(2, WORKER, [str(tmp_path), "qwen2,phi3", "2,1,1,1,files", "1,2,1,1,files"], 300)
