"""An engine that fails in the middle of generation: the command ends soon, says who and why, and
the same command goes on from the last checkpoint.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from command_line import FRESH, NO_EVALUATION, QUICKSTART, start
from packaged import PACKAGED

# Of the failed rank for the others, of the launcher for the rest, and what slow machines add.
SECONDS_TO_END = 23
CONFIG = (
    QUICKSTART / "grpo.yaml",
    *FRESH,
    "steps.prompts_per_step=4",
    "steps.samples_per_prompt=2",
    "steps.num_steps=4",
    *NO_EVALUATION,
    "reward.function=failing_engine:digits",
    "reward.extract=null",
    "log.tensorboard=false",
    "checkpoint.every=1",
)


def train(folder: Path, planted: str | None, *more: str) -> tuple[int, str, float]:
    """Returns the exit code, the output, and the seconds from the planted failure to the end."""
    clock = folder / "planted"
    extra = {"PLANTED": planted, "PLANTED_TIME": str(clock)} if planted else {}
    process = start(["train", *CONFIG, f"run.dir={folder}", *more, "--world", "2"], extra)
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    seconds = time.time() - float(clock.read_text()) if planted and clock.exists() else 0.0
    return process.returncode, output, seconds


def check_failures(folder: Path, failures: list[tuple[str, int, str]], *more: str) -> None:
    """Makes starts fail, each after where the one before continued to, and then finishes.

    Each failure: what is planted, the rank to be named, and what the other rank's log must say.
    """
    for planted, rank, said in failures:
        code, output, seconds = train(folder, planted, *more)
        step = int(planted.split(":")[0]) + 1
        assert code == 1, output[-3000:]
        assert 0 < seconds < SECONDS_TO_END, output[-3000:]
        (message,) = (line for line in output.splitlines() if line.startswith("hybridrl: rank"))
        assert message.startswith(f"hybridrl: rank {rank} on host"), message
        assert f"in phase 'generate, step {step}'" in message, message
        assert "RuntimeError: planted in a forward pass" in message, message
        log = (folder / "quickstart-grpo" / "logs" / f"rank_{1 - rank}.log").read_text()
        assert said in log.split("\n--- ")[-1], log[-3000:]
        print(f"{planted}: ended {seconds:.1f} s after the failure")
    code, output, _ = train(folder, None, *more)
    assert code == 0, output[-3000:]
    lines = (folder / "quickstart-grpo" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert all(0 <= record["generate/idle_share"] < 1 for record in records)


OTHER_FAILED = "PeerError: rank 1 failed in generation: RuntimeError: planted in a forward pass"
OWN_FAILED = "RuntimeError: planted in a forward pass"


@pytest.mark.dist
def test_hf_engine_that_fails_ends_the_command_which_can_go_on(tmp_path: Path) -> None:
    check_failures(tmp_path, [("1:1", 1, OTHER_FAILED)])


def of_packages(test: object) -> object:
    for mark in (pytest.mark.parametrize("engine", PACKAGED), pytest.mark.dist, pytest.mark.slow):
        test = mark(test)
    return test


@of_packages
@pytest.mark.full
def test_packaged_engine_that_fails_ends_the_command_which_can_go_on(
    engine: str, tmp_path: Path
) -> None:
    check_failures(tmp_path, [("1:1", 1, OTHER_FAILED)], f"rollout.engine={engine}")


@of_packages
@pytest.mark.full
@pytest.mark.parametrize(
    "failure",
    [("2:0", 0, "hybridrl: rank 0 on host"), ("1:1", 1, OTHER_FAILED)],
    ids=["rank 0", "rank 1"],
)
def test_engine_rank_that_fails_while_its_peer_sits_in_a_collective(
    engine: str, failure: tuple[str, int, str], tmp_path: Path
) -> None:
    """Rank 0 holds the key-value store of the job: with it goes what ranks can tell each other."""
    check_failures(tmp_path, [failure], f"rollout.engine={engine}", "rollout.tp=2")


@of_packages
@pytest.mark.full
def test_packaged_engines_that_fail_on_all_ranks(engine: str, tmp_path: Path) -> None:
    folder = tmp_path
    code, output, seconds = train(folder, "1:0,1", f"rollout.engine={engine}", "rollout.tp=2")
    assert code == 1 and seconds < SECONDS_TO_END, output[-3000:]
    for rank in range(2):
        log = (folder / "quickstart-grpo" / "logs" / f"rank_{rank}.log").read_text()
        assert OWN_FAILED in log
