"""A rank that is far slower than the others is waited for: see slow_ranks_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks


@pytest.mark.dist
@pytest.mark.waits
@pytest.mark.slow
def test_slow_ranks_are_waited_for_longer_than_any_collective_may_take(tmp_path: Path) -> None:
    worker = str(Path(__file__).with_name("slow_ranks_worker.py"))
    run_ranks(2, worker, [str(tmp_path)], timeout_s=240)
