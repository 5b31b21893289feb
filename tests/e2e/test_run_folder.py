"""What a run folder keeps and says between starts: checkpoints by lineage, one run at a time, and
`fit` that says what it did. One rank, in this process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import yaml
from small_runs import small_run

from hybridrl.checkpoint import run_lock
from hybridrl.checkpoint.folders import newest_checkpoint
from hybridrl.checkpoint.run_lock import LOCK_FILE, STALE_S, Holder, RunLock, check_free
from hybridrl.errors import UserError

NAME = "quickstart-grpo"
TOLD = "log.console=true"


def steps(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / NAME / "checkpoints").iterdir())


def test_fit_counts_from_where_it_stands_and_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_run(tmp_path, TOLD, "steps.num_steps=2", "checkpoint.every=1") as trainer:
        trainer.fit()
        assert trainer.step == 2
        assert "took steps 1 to 2" in capsys.readouterr().out
        trainer.fit(num_steps=2)
        assert trainer.step == 4 and "took steps 3 to 4" in capsys.readouterr().out
        trainer.fit(until=5)
        assert trainer.step == 5
        trainer.fit(until=5)
        assert trainer.step == 5 and "nothing is left to train" in capsys.readouterr().out
        trainer.fit(num_steps=0)
        assert trainer.step == 5
        for wrong in ({"num_steps": -1}, {"until": -1}, {"num_steps": 1, "until": 9}):
            with pytest.raises(UserError, match="fit"):
                trainer.fit(**wrong)
    with small_run(tmp_path, "steps.num_steps=2") as trainer:
        trainer.load_checkpoint(tmp_path / NAME / "checkpoints" / "step_4")
        trainer.fit(num_steps=2)
        assert trainer.step == 6


def test_a_finished_run_says_so_and_keeps_the_configuration_it_was_trained_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_run(tmp_path, TOLD, "steps.num_steps=2") as trainer:
        first = trainer.fit()
    before = {p: p.read_bytes() for p in (tmp_path / NAME).glob("*.*")}
    capsys.readouterr()
    changed = "train.learning_rate=0.5"
    with small_run(tmp_path, TOLD, "steps.num_steps=2", changed) as trainer:
        again = trainer.fit()
        assert again["reward_last_10"] == first["reward_last_10"] and again["seconds"] > 0
    said = capsys.readouterr().out
    assert "has reached step 2" in said and "steps.num_steps" in said
    assert "changed, but without effect: train.learning_rate 0.0001 -> 0.5" in said
    assert {p: p.read_bytes() for p in (tmp_path / NAME).glob("*.*")} == before
    # A run that goes on says what changed, and keeps it.
    with small_run(tmp_path, TOLD, "steps.num_steps=3", changed) as trainer:
        trainer.fit()
    said = capsys.readouterr().out
    assert "changed from step 3 on: train.learning_rate 0.0001 -> 0.5" in said
    assert (
        yaml.safe_load((tmp_path / NAME / "config.yaml").read_text())["train"]["learning_rate"]
        == 0.5
    )


def test_a_step_that_failed_is_taken_again_with_the_same_prompts(tmp_path: Path) -> None:
    with small_run(tmp_path / "whole", "steps.num_steps=3") as trainer:
        trainer.fit()
        expected = [p.detach().clone() for p in trainer.policy.model.weights().values()]
    with small_run(tmp_path / "failed", "steps.num_steps=3") as trainer:
        trainer.fit(num_steps=1)
        for owner, method in ((trainer.sampler, "advance"), (trainer.algorithm, "advantages")):
            setattr(owner, method, lambda *given: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                trainer.fit()
            delattr(owner, method)
        trainer.fit()
        found = list(trainer.policy.model.weights().values())
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_checkpoints_are_kept_by_lineage(tmp_path: Path) -> None:
    knobs = ("checkpoint.every=2", "checkpoint.keep=2", "steps.num_steps=12")
    root = tmp_path / NAME / "checkpoints"
    with small_run(tmp_path, "checkpoint.keep=9", *knobs[:1], *knobs[2:]) as trainer:
        trainer.fit()
    with small_run(tmp_path, *knobs) as trainer:
        trainer.load_checkpoint(root / "step_4")
        trainer.fit(until=6)
    # step_6 was written last: it stays, with its origin; 8 to 12 are of the course that was left.
    assert steps(tmp_path) == ["step_10", "step_12", "step_4", "step_6", "step_8"]
    assert newest_checkpoint(root) == root / "step_6"
    with small_run(tmp_path, *knobs) as trainer:  # a restart goes on from there
        trainer.fit(num_steps=2)
        assert trainer.step == 8
        assert steps(tmp_path) == ["step_10", "step_12", "step_6", "step_8"]
        trainer.fit()
    assert steps(tmp_path) == ["step_10", "step_12"]
    assert newest_checkpoint(root) == root / "step_12"


def test_a_checkpoint_keeps_its_name_until_another_has_taken_it(tmp_path: Path) -> None:
    """Killed between the two renames of a replacement, the old one gets its name back."""
    root = tmp_path / NAME / "checkpoints"
    with small_run(tmp_path, "steps.num_steps=2") as trainer:
        trainer.fit()
    (root / "step_2").rename(root / "step_2.replaced")
    with small_run(tmp_path, "steps.num_steps=3") as trainer:
        trainer.fit()
        assert trainer.step == 3
    assert steps(tmp_path) == ["step_2", "step_3"]


@pytest.fixture()
def other_process() -> int:
    """Yields the number of a process that runs."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process.pid  # type: ignore[misc]
    process.kill()
    process.wait()


def write_lock(folder: Path, holder: Holder) -> None:
    folder.mkdir(exist_ok=True)
    (folder / LOCK_FILE).write_text(json.dumps(asdict(holder)))


def test_two_runs_in_one_folder_are_refused(
    tmp_path: Path, other_process: int, capsys: pytest.CaptureFixture[str]
) -> None:
    import psutil

    started = psutil.Process(other_process).create_time()
    other = replace(Holder.here(), pid=other_process, process_start=started, token="other")
    with small_run(tmp_path, TOLD, "steps.num_steps=1") as trainer:
        write_lock(tmp_path / NAME, other)
        for attempt in (trainer.fit, trainer.save_checkpoint, lambda: check_free(tmp_path / NAME)):
            with pytest.raises(UserError, match="which another run is using") as caught:
                attempt()
            assert f"process {other_process} on host {other.host}" in str(caught.value)
            assert other.since in str(caught.value)
        assert not (tmp_path / NAME / "config.yaml").exists()
        # One of a process that has ended, or whose number another process has, is taken over.
        for gone in (replace(other, pid=2**22 + 1), replace(other, process_start=started - 60)):
            write_lock(tmp_path / NAME, gone)
            check_free(tmp_path / NAME)
            trainer.fit(num_steps=1)
            assert "taking over" in capsys.readouterr().out
            assert not (tmp_path / NAME / LOCK_FILE).exists()
        with pytest.raises(UserError, match=LOCK_FILE):
            (tmp_path / NAME / LOCK_FILE).write_text("damaged")
            trainer.fit(num_steps=1)
        (tmp_path / NAME / LOCK_FILE).unlink()


def test_a_lock_of_another_host_is_held_while_it_is_touched(tmp_path: Path) -> None:
    other = replace(Holder.here(), host="elsewhere", namespace="another boot", token="other")
    write_lock(tmp_path, other)
    with pytest.raises(UserError, match="elsewhere"):
        RunLock(tmp_path).acquire(print)
    before = time.time() - STALE_S - 5
    os.utime(tmp_path / LOCK_FILE, (before, before))
    own, told = RunLock(tmp_path), []
    assert own.acquire(told.append) and len(told) == 1
    assert not own.acquire(told.append), "it holds the folder already"
    # The other one wakes up and looks: it must not go on.
    write_lock(tmp_path, replace(other, token="new"))
    with pytest.raises(UserError, match="another run"):
        own.check()
    own.release()
    assert (tmp_path / LOCK_FILE).exists(), "it is another's"


def test_a_lock_of_the_launcher_is_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = RunLock(tmp_path)
    assert launcher.acquire(print)
    monkeypatch.setenv(run_lock.LOCK_TOKEN, launcher.token)
    assert not RunLock(tmp_path).acquire(print)
    check_free(tmp_path)
    launcher.release()
    assert not list(tmp_path.iterdir())


def test_of_processes_that_take_a_stale_lock_one_gets_it(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from hybridrl.checkpoint.run_lock import RunLock\n"
        "sys.stdin.readline()\n"
        "try: RunLock(Path(sys.argv[1])).acquire(lambda text: None); print('got')\n"
        "except Exception as error: print(type(error).__name__)\n"
        "sys.stdout.flush(); sys.stdin.readline()\n"
    )
    write_lock(tmp_path, replace(Holder.here(), pid=2**22 + 1, token="gone"))
    pipe = subprocess.PIPE
    racers = [
        subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=pipe, stdout=pipe, text=True)
        for _ in range(4)
    ]
    time.sleep(1)
    for racer in racers:
        racer.stdin.write("go\n")  # type: ignore[union-attr]
        racer.stdin.flush()  # type: ignore[union-attr]
    found = [racer.stdout.readline().strip() for racer in racers]  # type: ignore[union-attr]
    for racer in racers:
        racer.communicate("end\n")
    assert sorted(found) == ["UserError", "UserError", "UserError", "got"], found


def test_a_trainer_that_was_made_to_evaluate_does_not_train(tmp_path: Path) -> None:
    with small_run(tmp_path, trains=False) as trainer:
        assert trainer.reference is None
        with pytest.raises(UserError, match="a Trainer with trains=True"):
            trainer.train_step()
