"""What a run notes of its starts."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hybridrl.loop import run_starts
from hybridrl.loop.run_starts import RunStarts, StartTimes, exit_of
from hybridrl.parallel.failure import LAUNCHER_PID


def noted(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "run.json").read_text())["starts"]


def test_every_start_is_noted_with_its_end(tmp_path: Path) -> None:
    first = RunStarts(tmp_path)
    first.end("finished")  # nothing has begun
    assert not (tmp_path / "run.json").exists()
    first.begin(0, 4, 1, None)
    assert "exit" not in noted(tmp_path)[0]
    first.end("stopped by a signal")
    first.end("finished")  # it has ended already
    second = RunStarts(tmp_path)
    second.begin(7, 8, 2, "H100")
    one, other = noted(tmp_path)
    assert (one["exit"], one["device"], one["is_cpu"]) == ("stopped by a signal", "CPU", True)
    assert one["began"].endswith(" UTC") and one["ended"] >= one["began"]
    assert (other["after_step"], other["world_size"], other["hosts"]) == (7, 8, 2)
    assert (other["device"], other["is_cpu"]) == ("H100", False)


def test_a_start_waits_for_its_commit_at_the_end_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_find = threading.Event()
    monkeypatch.setattr(run_starts, "commit", lambda: str(may_find.wait(10)))
    start = RunStarts(tmp_path)
    start.begin(0, 1, 1, None)
    start.took({"imports": 1.234, "first step": 2.0})
    assert "commit" not in noted(tmp_path)[0]
    may_find.set()
    start.end("finished")
    start.took({"imports": 9.0})  # it has ended
    one = noted(tmp_path)[0]
    assert (one["commit"], one["exit"]) == ("True", "finished")
    assert one["seconds"] == {"imports": 1.23, "first step": 2.0}


def test_times_of_a_start_are_of_its_parts_and_end_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = StartTimes()
    time.sleep(0.05)
    assert times.over("imports") and times.over("step", is_last=True)
    assert not times.over("imports")
    assert 0.05 <= times.seconds["imports"] < 1 and times.seconds["step"] < 0.05
    for name in ("RANK", "WORLD_SIZE", LAUNCHER_PID):
        monkeypatch.setenv(name, "1")
    of_process = StartTimes()
    of_process.over("imports")
    assert of_process.seconds["imports"] > times.seconds["imports"]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (None, "finished"),
        (KeyboardInterrupt(), "stopped by a signal"),
        (SystemExit(143), "stopped by a signal"),
        (ValueError("x"), "failed: ValueError"),
    ],
)
def test_exit_says_how_a_start_ended(error: BaseException | None, text: str) -> None:
    assert exit_of(error) == text
