"""Environments over the ranks of a replica and over replicas; see episodes_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks


@pytest.mark.dist
def test_ranks_of_a_replica_agree_on_what_environments_answered() -> None:
    worker = str(Path(__file__).with_name("episodes_worker.py"))
    run_ranks(2, worker, [], timeout_s=300)
