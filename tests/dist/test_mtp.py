"""The layer for multi-token prediction as an auxiliary loss, in one process and in layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks

WORKER = str(Path(__file__).with_name("mtp_worker.py"))


@pytest.mark.dist
def test_multi_token_prediction_has_the_gradients_of_transformers(tmp_path: Path) -> None:
    run_ranks(1, WORKER, ["reference", str(tmp_path)], timeout_s=120)
    run_ranks(4, WORKER, ["compare", str(tmp_path), "2,2,1", "2,1,1", "1,2,2"], timeout_s=200)
