"""A step's tokens are where they are trained on, and come there once; see exchange_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks

WORKER = str(Path(__file__).with_name("exchange_worker.py"))


@pytest.mark.dist
def test_tokens_are_where_they_are_trained_on(tmp_path: Path) -> None:
    run_ranks(4, WORKER, [str(tmp_path)], timeout_s=200)
