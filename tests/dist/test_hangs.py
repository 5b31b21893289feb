"""Hangs that explain themselves: who is named, and what is written; see hang_worker.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from launch import run_ranks

from hybridrl.parallel.failure import LAUNCHER_PID, LOG_DIR, Failure

WORKER = str(Path(__file__).with_name("hang_worker.py"))
NAMED_S = 15.0  # with limits of 2.5 s, on a busy host


def run(folder: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs three ranks, one of which is stopped in the end; returns the end of their output."""
    logs = folder / "logs"
    logs.mkdir()
    monkeypatch.setenv(LOG_DIR, str(logs))
    monkeypatch.setenv(LAUNCHER_PID, str(os.getpid()))
    for rank in range(3):
        (logs / f"rank_{rank}.log").touch()
    with pytest.raises(AssertionError) as ended:
        run_ranks(3, WORKER, [str(folder), case], timeout_s=240)
    return str(ended.value)


def report(folder: Path, step: int, within_s: float = NAMED_S) -> str:
    """Returns the report of a step, which came in time."""
    file = folder / "hangs" / f"step_{step}.txt"
    began = folder / f"began_{step}"
    if began.exists():
        took_s = file.stat().st_mtime - began.stat().st_mtime
        print(f"the report of case {step} came after {took_s:.1f} s")
        assert took_s < within_s
    return file.read_text()


@pytest.mark.dist
@pytest.mark.waits
def test_ranks_without_progress_are_named_with_a_report_and_slow_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = run(tmp_path, "cases", monkeypatch)
    assert not (tmp_path / "hangs" / "step_1.txt").exists()
    logs = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in range(3)]
    # The rank that judges writes its stacks at once, the others with their next beat: rank 1 may
    # have seen the report before, and have gone on.
    assert "in arrive" in logs[0] and all("hang_worker.py" in log for log in logs)

    text = report(tmp_path, 2)
    message = text.splitlines()[0]
    assert message.startswith("rank 1 on host "), text
    assert "has made no progress for" in message and "in phase 'case 2, step 2'" in message
    assert "in spin" in message and "ranks 0, 2 wait after 'a rank in an endless loop'" in message
    assert "barrier" in message or "all_reduce" in message, message
    assert "\nrank 1 on host" in text and "(suspected)" in text.split("\nrank 0")[0]
    assert f"{tmp_path}/hangs/step_2.txt" in output and "rank 1 continued after" in output

    text = report(tmp_path, 3)
    message = text.splitlines()[0]
    assert message.startswith("rank 1 on host ") and "in spin" in message
    assert "ranks 0, 2 wait in all_reduce of float [3, 4], #2 of group " in message
    assert "GRADS (ranks 0-2)" in message
    assert "process group " in text and "  rank 1: #1 all_reduce of float [2], finished\n" in text

    if not torch.cuda.is_available():
        message = report(tmp_path, 4).splitlines()[0]
        assert message.startswith(
            "a send with its receive is slow: ranks 0-1 have been inside for "
        )
        assert "rank 1 in phase 'case 4, step 4'" in message and "in recv" in message, message
        assert "; rank 2 waits in all_reduce of float [2]" in message

    text = report(tmp_path, 5)
    message = text.splitlines()[0]
    assert message.startswith("ranks have waited for each other in different collectives for ")
    assert message.index("rank 1 in broadcast of long [7]") < message.index(
        "ranks 0, 2 in all_reduce of float [5, 6]"
    )
    assert "EXPERTS" in message and "GRADS" in message
    assert text.index("rank 1 on host") < text.index("rank 0 on host")

    text = report(tmp_path, 6)
    assert text.splitlines()[0].startswith("rank 1 on host "), text
    assert "gave no sign of life for 1.6 s: its process is stopped" in text
    assert "does not answer: its process is stopped (by SIGSTOP or a debugger)" in text
    failure = Failure.read(tmp_path / "logs" / "rank_0.error")
    assert failure is not None and failure.culprit == 1
    assert failure.message.endswith(f"; all ranks: {tmp_path}/hangs/step_6.txt")


@pytest.mark.dist
@pytest.mark.waits
@pytest.mark.full
def test_the_rank_that_judges_is_named_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "first", monkeypatch)
    text = report(tmp_path, 1)
    assert text.splitlines()[0].startswith("rank 0 on host "), text
    assert "does not answer: no rank has reported the end of its process" in text
    assert "in first" in (tmp_path / "logs" / "rank_0.log").read_text()  # got by a signal
    said = [(tmp_path / f"said_{rank}").read_text() for rank in (1, 2)]
    assert all("gave no sign of life for 1.6 s: its process is stopped" in one for one in said)
    logs = [(tmp_path / "logs" / f"rank_{rank}.log").read_text() for rank in (1, 2)]
    assert all("in arrive" in log for log in logs)


@pytest.mark.dist
@pytest.mark.waits
@pytest.mark.full
def test_with_a_run_s_limits_each_is_named_within_40_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, "usual", monkeypatch)
    firsts = [report(tmp_path, step, 40).splitlines()[0] for step in (2, 3, 5, 6)]
    assert [one.startswith("rank 1 on host ") for one in firsts] == [True, True, False, True]
    assert "rank 1 in broadcast of long [7]" in firsts[2]
