"""`hybridrl top`: a run's folder as it is read while the run goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridrl.checkpoint.run_lock import RunLock
from hybridrl.cli.top import run_text, watch
from hybridrl.errors import UserError
from hybridrl.metrics.sinks import JsonlSink
from hybridrl.metrics.timing import PhaseTimer
from hybridrl.parallel.watch import Beat
from hybridrl.services.liveness.hang_reports import HangReports


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run of six ranks, of which rank 4 generates still and rank 5 has failed."""
    run = tmp_path / "math"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {name: math}\nsteps: {num_steps: 40}\n")
    for rank in range(6):
        timer = PhaseTimer(run / "logs" / f"rank_{rank}.phase")
        timer.start_step(3)
        with timer.phase("rollout" if rank == 4 else "update"):
            if rank == 5:
                (run / "logs" / "rank_5.error").write_text("{}")
            # As it stands within the phase.
            text = (run / "logs" / f"rank_{rank}.phase").read_text()
        timer.close()
        file = run / "logs" / f"rank_{rank}.phase"
        file.write_text(text)
        ago = time.time() - (70 if rank == 4 else 10)
        os.utime(file, (ago, ago))
    sink = JsonlSink(run / "metrics.jsonl")
    for step in (1, 2):
        sink.write(
            step,
            {
                "time_s/step": 2.0 * step,
                "throughput/tokens_per_s_per_gpu": 900.0,
                "reward/mean": 0.25,
                "policy/loss": float("nan"),
                "memory/peak_gib": 61.5,
            },
        )
    sink.close()
    lock = RunLock(run)
    lock.acquire(print)
    yield run
    lock.release()


def test_top_says_what_ranks_do_and_what_the_last_step_gave(folder: Path) -> None:
    lines = run_text(folder).splitlines()
    assert lines[0].startswith(f"math: step 2/40, held by process {os.getpid()} on host")
    assert lines[1] == (
        "last step: 4.00 s per step, 900 tokens/s per rank, reward 0.250, "
        "at most 61.50 GiB on a rank"
    )
    assert sorted(lines[2:4]) == [
        "  rollout, step 3: rank 4 for 70 s",
        "  update, step 3, failed: rank 5 for 10 s",
    ]
    assert lines[4:] == ["  update, step 3: ranks 0-3 for 10 s"]


def test_top_counts_epochs_where_the_configuration_does(folder: Path) -> None:
    (folder / "config.yaml").write_text("steps: {num_steps: 100, num_epochs: 12.0}\n")
    sink = JsonlSink(folder / "metrics.jsonl", last_step=2)
    sink.write(3, {"train/epoch": 1.5})
    sink.close()
    assert "math: step 3, epoch 1.50 of 12, " in run_text(folder)


def test_top_says_what_waits_in_runs_with_a_lag(folder: Path) -> None:
    assert "queue" not in run_text(folder)
    sink = JsonlSink(folder / "metrics.jsonl", last_step=2)
    sink.write(
        3,
        {
            "reward/mean": 0.25,
            "lag/unfinished": 12.0,
            "lag/waiting": 4.0,
            "lag/dropped": 0.0,
            "lag/mean": 0.4375,
            "lag/max": 1.0,
            "lag/mixed_share": 0.5,
            "idle/training": 0.125,
            "idle/rollout": 0.05,
        },
    )
    sink.close()
    lines = run_text(folder).splitlines()
    assert lines[1:3] == [
        "last step: reward 0.250",
        "queue: 12 samples unfinished, 4 finished samples waiting for a step, 0 dropped, "
        "weights 0.44 steps old, 1 at most, training ranks wait 12% of the time, "
        "generating ranks 5%",
    ]


@pytest.mark.parametrize(
    ("start", "state"),
    [
        ({"exit": "finished", "ended": "2026-02-03 04:05:06 UTC"}, "finished, 2026-02-03 04:05"),
        ({"exit": "stopped by a signal", "ended": "2026-02-03"}, "stopped by a signal, 2026-02-03"),
        ({"after_step": 0}, "ended without a record"),
    ],
)
def test_top_says_how_a_run_ended_and_not_for_how_long_ranks_have_been_gone(
    start: dict[str, object], state: str, folder: Path
) -> None:
    (folder / "run.lock").unlink()
    (folder / "run.json").write_text(json.dumps({"starts": [{"exit": "finished"}, start]}))
    lines = run_text(folder).splitlines()
    assert lines[0].startswith(f"math: step 2/40, {state}") and lines[1].startswith("last step: 4")
    assert (len(lines) == 2) == state.startswith("finished")
    for file in (folder / "logs").iterdir():  # as after a start with nothing left to train
        file.unlink()
    assert ("no rank" in run_text(folder)) != state.startswith("finished")
    if not state.startswith("finished"):
        assert sorted(lines[2:]) == [
            "  ended in rollout, step 3: rank 4",
            "  ended in update, step 3, failed: rank 5",
            "  ended in update, step 3: ranks 0-3",
        ]


def test_top_says_that_who_holds_the_folder_is_gone(folder: Path) -> None:
    file = folder / "run.lock"
    file.write_text(json.dumps({**json.loads(file.read_text()), "process_start": 1.0}))
    said = run_text(folder).splitlines()[0]
    assert said.startswith("math: step 2/40, no process holds the folder; process ")
    assert said.endswith("no longer runs")


def test_top_reads_a_run_that_has_just_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").mkdir()
    watch(tmp_path, 1.0)  # once: it is no terminal
    said = capsys.readouterr().out
    assert said == (
        f"{tmp_path.name}: step 0/?, no process holds the folder\n  no rank has started\n"
    )


def test_top_refuses_what_is_no_run(tmp_path: Path) -> None:
    for path, found in ((tmp_path, "a folder without logs"), (tmp_path / "a", "no such folder")):
        with pytest.raises(UserError) as caught:
            run_text(path)
        assert str(caught.value).startswith(f"{path}: got {found}; allowed: a run folder.")


def test_top_tells_of_ranks_without_progress_until_a_step_is_taken(folder: Path) -> None:
    beat = Beat(1, "a", "a/1", "update, step 3")
    said = HangReports(lambda silent: None).explained(
        "rank 0 stands still", [0], [beat], [], folder
    )
    before = time.time() - 60
    os.utime(folder / "metrics.jsonl", (before, before))
    lines = run_text(folder).splitlines()
    assert lines[-1] == said and said.endswith("hangs/step_3.txt")
    after = time.time() + 60
    os.utime(folder / "metrics.jsonl", (after, after))
    assert "stands still" not in run_text(folder)
