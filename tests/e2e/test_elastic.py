"""A run that loses ranks for good goes on with fewer, as one with all of them would have."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import yaml
from command_line import QUICKSTART, exported_weights, run, start
from test_resume import MODEL, SMALL, rank_process, wait_for

from hybridrl.checkpoint.memory_folders import host_folder, run_id

GRPO = (
    "model.path=null",
    MODEL,
    *SMALL,
    "steps.prompts_per_step=8",
    "steps.samples_per_prompt=4",
    "steps.num_steps=8",
    "reward.function=lost_ranks:digits",
    "reward.isolated=false",
    "reward.extract=null",
    "train.learning_rate=1e-3",
    "checkpoint.every=1",
    "checkpoint.keep=2",
)
CONFIG = QUICKSTART / "grpo.yaml"
TWO_BY_TWO = ("train.tp=2", "train.pp=1")
KEYS = ("reward/mean", "policy/loss", "policy/kl", "policy/grad_norm")


def arguments(folder: Path, *knobs: str, config: Path = CONFIG) -> list[str | Path]:
    return ["train", config, *GRPO, f"run.dir={folder}", *knobs]


def records(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "quickstart-grpo" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    run(*arguments(folder, *TWO_BY_TWO), "--world", "4")
    return folder


def check_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """Another number of ranks adds in another order: float32 sums differ by 1e-7 of themselves, and
    losses are means of a few hundred terms of about 1.
    """
    assert [one["step"] for one in found] == [one["step"] for one in expected]
    for key in KEYS:
        differences = [abs(a[key] - b[key]) for a, b in zip(found, expected, strict=True)]
        print(f"{key}: largest difference {max(differences):.2g}")
        assert max(differences) < 1e-5, key


def lose_a_rank(folder: Path, rank: int, *knobs: str, config: Path = CONFIG) -> tuple[str, float]:
    """Runs four ranks, one of which is killed in step 4 and does not come back. Returns the output
    and how long it took until a step was taken again, seconds.
    """
    broken = folder / "broken"
    process = start(
        [*arguments(folder, "run.max_restarts=3", *knobs, config=config), "--world", "4"],
        {"LOST_RANKS": str(broken)},
    )
    try:
        logs = folder / "quickstart-grpo" / "logs"
        wait_for(logs / f"rank_{rank}.phase", "update, step 4")
        broken.write_text(f"4 {rank}")
        os.kill(rank_process(process.pid, rank).pid, signal.SIGKILL)
        killed = time.monotonic()
        wait_for(logs / "rank_0.phase", "step 6")
        took = time.monotonic() - killed
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    print(f"training went on after {took:.1f} s")
    return output, took


@pytest.mark.dist
@pytest.mark.parametrize("rank", [3, pytest.param(0, marks=pytest.mark.full)])
def test_a_run_goes_on_with_fewer_ranks_and_the_same_losses(
    rank: int, unbroken: Path, tmp_path: Path
) -> None:
    output, took = lose_a_rank(tmp_path, rank, *TWO_BY_TWO)
    assert took < 60
    said = [line for line in output.splitlines() if "(run.max_restarts)" in line]
    assert ["4 ranks" in line for line in said] == [True, False], output[-4000:]
    assert "2 ranks go on" in said[1]  # three cannot share tp=2
    check_same(records(tmp_path), records(unbroken))


@pytest.mark.dist
@pytest.mark.full
def test_a_chosen_layout_is_chosen_anew_for_fewer_ranks(tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for folder in (unbroken, broken):
        folder.mkdir()
    config = yaml.safe_load(CONFIG.read_text())  # without what may be chosen
    for key in ("tp", "pp", "micro_batch_tokens"):
        del config["train"][key]
    del config["rollout"]["tp"]
    file = tmp_path / "auto.yaml"
    file.write_text(yaml.safe_dump(config))
    run(*arguments(unbroken, "layout=auto", config=file), "--world", "4")
    output, took = lose_a_rank(broken, 3, "layout=auto", config=file)
    assert took < 60 and "3 ranks go on" in output, output[-4000:]
    layout = yaml.safe_load((broken / "quickstart-grpo" / "config.yaml").read_text())["layout"]
    assert layout["choose"] == "auto" and layout["chosen_for"] == 3
    check_same(records(broken), records(unbroken))


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize("phase", ["generate, step 4", "update, step 5", "reshard, step 6"])
def test_a_run_goes_on_bitwise_from_a_copy_in_memory(
    phase: str, unbroken: Path, tmp_path: Path
) -> None:
    knobs = ("run.max_restarts=3", "checkpoint.every=0", "checkpoint.copy_every=1")
    process = start([*arguments(tmp_path, *TWO_BY_TWO, *knobs), "--world", "4"])
    folder = tmp_path / "quickstart-grpo"
    wait_for(folder / "logs" / "rank_2.phase", phase)
    os.kill(rank_process(process.pid, 2).pid, signal.SIGKILL)
    copies = host_folder(run_id(folder))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-4000:]
    assert "was in host memory, and is in" in output
    starts = json.loads((folder / "run.json").read_text())["starts"]
    step = int(phase.rpartition(" ")[2])
    assert len(starts) == 2 and step - 2 <= starts[1]["after_step"] <= step
    weights = [
        exported_weights(one / "quickstart-grpo", tmp_path / name)
        for name, one in (("a", unbroken), ("b", tmp_path))
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for ours, theirs in zip(records(tmp_path), records(unbroken), strict=True):
        assert all(ours[key] == theirs[key] for key in KEYS)
    assert not copies.exists()
