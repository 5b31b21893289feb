"""Ranks that are late, busy or stopped, as the others see them; see heartbeat_worker.py."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from launch import run_ranks

from hybridrl.parallel.failure import LAUNCHER_PID, LOG_DIR, Failure

WORKER = str(Path(__file__).with_name("heartbeat_worker.py"))


@pytest.mark.dist
@pytest.mark.waits
def test_late_and_busy_ranks_are_waited_for_and_a_stopped_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOG_DIR, str(tmp_path))
    monkeypatch.setenv(LAUNCHER_PID, str(os.getpid()))
    with pytest.raises(AssertionError, match="rank 2, exit 1"):
        run_ranks(3, WORKER, [str(tmp_path)], timeout_s=240)
    assert all((tmp_path / f"passed_{rank}").exists() for rank in range(3))
    said = (tmp_path / "said").read_text()
    assert re.search(r"^rank 1 on host \S+ gave no sign of life for 1.6 s: its process is ", said)
    assert "stopped (by SIGSTOP" in said and "in phase 'testing, step 3'" in said, said
    assert re.search(r"at heartbeat_worker.py:\d+ in stop_here < .* in main", said), said
    # Nothing calls rank 2 back from its collective: it wrote where it was, and ended.
    failure = Failure.read(tmp_path / "rank_2.error")
    assert failure is not None and failure.kind == "lost" and failure.culprit == 1
    assert failure.message == said
    log = (tmp_path / "rank_2.log").read_text()
    assert "heartbeat_worker.py" in log and "in all_reduce" in log, log
    assert "in arrive" in (tmp_path / "rank_0.log").read_text()
    assert time.time() - float((tmp_path / "began_1").read_text()) < 30
