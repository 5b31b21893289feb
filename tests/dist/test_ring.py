"""Hosts send files round a ring; see ring_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks

WORKER = str(Path(__file__).with_name("ring_worker.py"))


@pytest.mark.dist
@pytest.mark.waits
def test_files_go_round_the_hosts_and_a_full_host_holds_nobody_up(tmp_path: Path) -> None:
    run_ranks(3, WORKER, [str(tmp_path)], timeout_s=100)
