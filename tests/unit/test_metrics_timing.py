"""Phase times, and the file that tells what a dead rank was doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hybridrl.metrics.timing import PhaseTimer


def test_phase_timer_adds_up_a_phase_and_counts_nested_ones_in_both() -> None:
    timer = PhaseTimer()
    timer.start_step(3)
    for _ in range(2):
        with timer.phase("update"):
            time.sleep(0.02)
    with timer.phase("outer"), timer.phase("inner"):
        time.sleep(0.02)
    seconds = timer.seconds()
    assert 0.04 <= seconds["update"] < 1
    assert 0.02 <= seconds["inner"] <= seconds["outer"]
    assert seconds["step"] >= seconds["update"] + seconds["outer"]
    timer.start_step(4)
    assert timer.seconds().keys() == {"step"}


def test_phase_timer_has_the_most_memory_of_each_phase_and_its_spans() -> None:
    used = iter([1, 5, 2, 9, 3, 4, 6, 7, 2, 1])  # bytes, at most, between one look and the next
    timer = PhaseTimer(take_peak=lambda: next(used))
    timer.start_step(1)
    with timer.phase("outer"):  # 5 before it
        with timer.phase("inner"):  # 2 before it
            pass  # 9
        with timer.phase("inner"):  # 3 before it
            pass  # 4
    found = timer.peak_bytes()  # 6 after it, and 7 since
    assert found == {"outer": 9, "inner": 9, "step": 9, "run": 9}
    assert [span.name for span in timer.spans()] == ["inner", "inner", "outer"]
    first, second, outer = timer.spans()
    assert outer.began <= first.began <= first.ended <= second.began <= second.ended <= outer.ended
    timer.start_step(2)
    assert timer.spans() == [] and timer.peak_bytes() == {"step": 1, "run": 9}
    assert PhaseTimer().peak_bytes() == {}


def test_phase_timer_surrounds_phases() -> None:
    calls: list[str] = []

    @contextmanager
    def around(name: str) -> Iterator[None]:
        calls.append(f"before {name}")
        yield
        calls.append(f"after {name}")

    timer = PhaseTimer(synchronize=lambda: calls.append("sync"))
    timer.around = around
    with timer.phase("generate"):
        calls.append("work")
    with pytest.raises(KeyError), timer.phase("update"):
        raise KeyError
    assert calls[:5] == ["before generate", "sync", "work", "sync", "after generate"]
    assert calls[5:] == ["before update", "sync"]


def test_the_phase_file_tells_where_a_killed_process_was(tmp_path: Path) -> None:
    path = tmp_path / "rank_1.phase"
    script = (
        "import sys, time; from pathlib import Path\n"
        "from hybridrl.metrics.timing import PhaseTimer\n"
        "timer = PhaseTimer(Path(sys.argv[1])); timer.start_step(7)\n"
        "with timer.phase('update'):\n    print('in', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=10)
    assert path.read_text().strip() == "update, step 7"
