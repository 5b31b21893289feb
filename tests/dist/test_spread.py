"""Prompts over two replicas by the lengths that responses had; see spread_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks


@pytest.mark.dist
def test_prompts_are_spread_by_the_length_of_earlier_responses(tmp_path: Path) -> None:
    worker = str(Path(__file__).with_name("spread_worker.py"))
    run_ranks(2, worker, [str(tmp_path)], timeout_s=180)
