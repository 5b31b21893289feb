"""Checkpoints that are written while training goes on, the clock that asks for them, and how a run
is stopped beside signals. One rank, in this process; ranks that are killed are in test_resume.py.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_runs import files_of_at_most, small_run

from hybridrl import Trainer
from hybridrl.checkpoint.folders import Checkpoint
from hybridrl.checkpoint.manifest import verify_all
from hybridrl.checkpoint.sharded_files import _FileWriter
from hybridrl.errors import CheckpointError
from hybridrl.parallel import stopping

NAME = "quickstart-grpo"
KNOBS = ("steps.num_steps=4", "checkpoint.every=1", "checkpoint.keep=9", "train.learning_rate=1e-3")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / NAME / "checkpoints").iterdir())


def tensors(checkpoint: Checkpoint) -> list[str]:
    """Returns the digests of all tensors of the policy and its optimizer."""
    files = checkpoint.manifest.files
    parts = [file for name, file in files.items() if name.endswith(".distcp")]
    assert parts
    return sorted(piece.xxh3 for file in parts for piece in file.pieces)


def after_each_step(trainer: Trainer, look: Callable[[int], None]) -> None:
    real = trainer.train_step

    def step() -> dict[str, float]:
        found = real()
        look(trainer.step)
        return found

    trainer.train_step = step  # type: ignore[method-assign]


def found_in(folder: Path) -> dict[str, tuple[list[str], list[int]]]:
    """Returns tensors and lineage of a run's checkpoints, after a check of all their bytes."""
    found = {}
    for name in names(folder):
        checkpoint = Checkpoint.open(folder / NAME / "checkpoints" / name)
        verify_all(checkpoint.folder, checkpoint.manifest)
        lineage = [ancestor.step for ancestor in checkpoint.manifest.lineage]
        found[name] = tensors(checkpoint), lineage
    return found


def test_what_is_written_meanwhile_is_what_waiting_would_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_run(tmp_path / "waits", *KNOBS, "checkpoint.asynchronous=false") as trainer:
        trainer.fit()
    waited = found_in(tmp_path / "waits")
    assert {name: lineage for name, (_, lineage) in waited.items()} == {
        "step_1": [],
        "step_2": [1],
        "step_3": [2, 1],
        "step_4": [3, 2, 1],
    }
    assert len({str(pieces) for pieces, _ in waited.values()}) == 4  # weights changed

    # A disk that takes its time: steps go on, and the folder has its name when all is written.
    # The next checkpoint waits for it.
    are_free, seen, write = [threading.Event() for _ in range(3)], {}, _FileWriter.write
    remaining = list(are_free)

    def slow(writer: _FileWriter) -> None:
        assert remaining.pop(0).wait(60)
        write(writer)

    def look(step: int) -> None:
        seen[step] = names(tmp_path / "slow") if step > 1 else []
        if step == 3:
            are_free[0].set()
            trainer.store._pending.writing.join()  # type: ignore[union-attr]
        if step == 4:
            are_free[2].set()
            threading.Timer(1.0, are_free[1].set).start()

    monkeypatch.setattr(_FileWriter, "write", slow)
    slow_knobs = ("checkpoint.every=0", "checkpoint.every_s=0.001")
    with small_run(tmp_path / "slow", *KNOBS, *slow_knobs) as trainer:
        after_each_step(trainer, look)
        real, due = trainer.checkpoints.is_due, []
        trainer.checkpoints.is_due = lambda step, last: (  # type: ignore[method-assign]
            due.append(real(step, last)) or (due[-1] and step in (1, 3, 4))
        )
        trainer.fit()
    assert due == [True] * 4  # by the clock
    now = ["step_1", "step_3.partial"]
    assert seen == {1: [], 2: ["step_1.partial"], 3: ["step_1.partial"], 4: now}
    written = found_in(tmp_path / "slow")
    assert [lineage for _, lineage in written.values()] == [[], [1], [3, 1]] and not remaining
    for name in ("step_1", "step_3", "step_4"):
        assert written[name][0] == waited[name][0]


def test_a_full_disk_is_told_at_the_next_step_and_a_file_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stopping, "LOOK_S", 0.02)
    with small_run(tmp_path, *KNOBS, "log.console=true") as trainer:
        trainer.fit(until=1)
        with files_of_at_most(10_000), pytest.raises(CheckpointError, match="step_2"):
            trainer.fit()
        assert names(tmp_path) == ["step_1"] and trainer.store.unfinished is None  # it stays
        first = trainer.step + 1
        assert first < 4

        def ask(step: int) -> None:
            (tmp_path / NAME / "stop").touch()
            time.sleep(0.2)

        after_each_step(trainer, ask)
        with pytest.raises(SystemExit) as ended:
            trainer.fit()
        assert ended.value.code == 143 and not (tmp_path / NAME / "stop").exists()
        said = f"stopped by SIGTERM after step {first} of 4: saved to"
        assert said in capsys.readouterr().out
    assert names(tmp_path)[0] == "step_1" and names(tmp_path)[-1] == f"step_{first}"


@pytest.mark.parametrize(("grace_s", "is_complete"), [(30.0, True), (0.3, False)])
def test_an_error_does_not_lose_what_is_being_written(
    grace_s: float,
    is_complete: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write = _FileWriter.write

    def slow(writer: _FileWriter) -> None:
        time.sleep(1.5)
        write(writer)

    def fail(step: int) -> None:
        monkeypatch.setattr(_FileWriter, "write", slow)
        if step == 2:  # that of step 1 is being written
            raise RuntimeError("a fault of the user's loop")

    knobs = ("checkpoint.every=1", "log.console=true", f"run.grace_s={grace_s}")
    with small_run(tmp_path, *KNOBS, *knobs) as trainer:
        after_each_step(trainer, fail)
        with pytest.raises(RuntimeError, match="a fault of"):
            trainer.fit()
        said = capsys.readouterr().out
        assert (trainer.store.unfinished is None) is is_complete
        assert ("step_1, which was being written, is complete" in said) is is_complete
        assert (
            f"had written their files within run.grace_s={grace_s:g}" in said
        ) is not is_complete
        if not is_complete:
            assert names(tmp_path) == ["step_1.partial"]
            trainer.store._pending.writing.join()  # type: ignore[union-attr]
    # What was not written in time is completed when the trainer is closed.
    assert list(found_in(tmp_path)) == ["step_1"]


def test_a_trainer_that_is_closed_completes_what_is_being_written(tmp_path: Path) -> None:
    with small_run(tmp_path, *KNOBS) as trainer:
        trainer.check_engine()
        trainer.train_step()
        trainer.save_checkpoint(waits=False)
    assert list(found_in(tmp_path)) == ["step_1"]


def test_a_phase_that_does_not_end_after_a_signal_ends_unsaved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stopping, "LOOK_S", 0.02)
    codes: list[int] = []
    is_saving = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        is_saving.set()

    monkeypatch.setattr(stopping.os, "_exit", end)
    monkeypatch.setenv("RANK", "0")
    heartbeat = SimpleNamespace(stop_signal=signal.SIGINT, phase=lambda: "update, step 3")
    world: Any = SimpleNamespace(rank=0, heartbeat=heartbeat)
    began = time.monotonic()
    stopping._look(world, stopping.Notice(0.2, tmp_path / "stop"), is_saving)
    assert codes == [130] and time.monotonic() - began > 0.2
    said = capsys.readouterr().err
    assert "phase 'update, step 3' did not end within run.grace_s=0.2; nothing was saved" in said
