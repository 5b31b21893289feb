"""A failure of one rank becomes known to all, or ends the job soon; see agreement_worker.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from launch import run_ranks

WORKER = str(Path(__file__).with_name("agreement_worker.py"))


@pytest.mark.dist
@pytest.mark.waits
def test_ranks_agree_on_failures_and_a_stuck_peer_is_let_go(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit 3"):
        run_ranks(2, WORKER, [str(tmp_path)], timeout_s=100)
    assert (tmp_path / "passed_0").exists() and (tmp_path / "passed_1").exists()
    (second, peer), (first, own) = (
        pickle.loads((tmp_path / str(rank)).read_bytes()) for rank in range(2)
    )
    assert own == "alone"
    assert peer == "rank 1 failed in the part: ValueError: alone"
    assert second - first < 10  # gloo's own bound is 60 s
