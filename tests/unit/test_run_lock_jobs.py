"""A Slurm job that is started again after its node was lost takes its own run folder over."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hybridrl.checkpoint import run_lock
from hybridrl.checkpoint.run_lock import LOCK_FILE, Holder, RunLock, check_free
from hybridrl.errors import UserError

VARIABLES = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME")


def started(monkeypatch: pytest.MonkeyPatch, job: str | None, restarts: str | None) -> None:
    """Stands in for the variables of a job."""
    for name, value in zip(VARIABLES, (job, restarts, None), strict=True):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


def held_elsewhere(folder: Path) -> None:
    """Leaves a fresh lock of another host, as its node's loss does."""
    lock = replace(Holder.here(), namespace="another boot", host="lost")
    (folder / LOCK_FILE).write_text(json.dumps(asdict(lock)))


def test_a_job_that_is_started_again_takes_its_folder_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started(monkeypatch, "77", None)
    held_elsewhere(tmp_path)
    started(monkeypatch, "77", "1")
    check_free(tmp_path)
    told: list[str] = []
    lock = RunLock(tmp_path)
    assert lock.acquire(told.append) and "on host lost" in told[0]
    lock.release()


@pytest.mark.parametrize(("job", "restarts"), [("77", "1"), ("77", "0"), ("78", "2"), (None, None)])
def test_any_other_start_is_refused(
    job: str | None, restarts: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same start on another node of the job, an earlier one, another job, and none."""
    started(monkeypatch, "77", "1")
    held_elsewhere(tmp_path)
    started(monkeypatch, job, restarts)
    with pytest.raises(UserError, match="another run is using"):
        check_free(tmp_path)
    with pytest.raises(UserError, match="another run is using"):
        RunLock(tmp_path).acquire(print)


def test_a_lock_without_a_job_is_read(tmp_path: Path) -> None:
    """As earlier versions wrote it."""
    written = {**asdict(replace(Holder.here(), namespace="another boot"))}
    del written["job"], written["restarts"]
    (tmp_path / LOCK_FILE).write_text(json.dumps(written))
    with pytest.raises(UserError, match="another run is using"):
        check_free(tmp_path)


def test_a_run_keeps_no_lock_fresh_that_another_run_has_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "TOUCH_S", 0.02)
    lock = RunLock(tmp_path)
    lock.acquire(print)
    file = tmp_path / LOCK_FILE
    os.utime(file, (1000, 1000))
    deadline = time.monotonic() + 20
    while file.stat().st_mtime == 1000:  # its own one is kept
        assert time.monotonic() < deadline
        time.sleep(0.01)
    held_elsewhere(tmp_path)
    os.utime(file, (1000, 1000))
    time.sleep(0.3)
    assert file.stat().st_mtime == 1000
    lock.release()
    assert file.exists()
