"""Ranks agree on a checkpoint: rank 0 chooses it, all see the same, and all hear of damage."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks

WORKER = str(Path(__file__).with_name("checkpoint_ranks_worker.py"))


@pytest.mark.dist
def test_ranks_load_one_checkpoint_or_all_say_why_not(tmp_path: Path) -> None:
    run_ranks(2, WORKER, [str(tmp_path)], timeout_s=240)
