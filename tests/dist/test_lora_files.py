"""Adapters in PEFT directories and checkpoints, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks
from tiny_models import save_tiny_models

WORKER = str(Path(__file__).with_name("lora_worker.py"))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("families", "layouts"),
    [
        (("phi3", "mixtral"), ("2,1,1,1,experts,files", "1,2,1,1,experts,files")),
        pytest.param(("qwen2",), ("2,1,1,1,files", "1,2,1,1,files"), marks=pytest.mark.full),
        pytest.param(
            ("mixtral", "deepseek_v3"),
            ("2,1,1,1,ep=2,experts,files", "2,1,1,1,etp=2,experts,files", "1,2,1,1,experts,files"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_peft_directory_comes_back_bitwise_and_checkpoints_move(
    families: tuple[str, ...], layouts: tuple[str, ...], tmp_path: Path
) -> None:
    """TP2 and PP2 continue from checkpoints of each other, EP2 from one of ETP2."""
    save_tiny_models(tmp_path, families)
    run_ranks(2, WORKER, [str(tmp_path), ",".join(families), *layouts], 300)
