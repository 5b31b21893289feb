"""Runs of online DPO, and of GRPO with a term of SFT, through the command line: they learn, go on
after a stop, and refuse what is wrong before any rank starts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import mean

import pytest
import torch
from command_line import QUICKSTART, exported_weights, records, run

MIXED = QUICKSTART / "grpo_sft.yaml"
RISE = 0.1  # of held-out accuracy; a deviation of it over 512 prompts is 0.02
ONE = ("train.tp=1", "train.pp=1", "log.tensorboard=false")
SHORT = (
    "model.path=null",
    f"model.init={QUICKSTART / 'model'}",
    *ONE,
    "data.eval_prompts=null",
    "steps.eval_every=0",
    "steps.prompts_per_step=6",
    "steps.samples_per_prompt=3",
    "steps.updates_per_step=2",
    "steps.num_steps=4",
    "mix.sft.prompts_per_step=8",
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "train.learning_rate=1e-3",
)


@pytest.fixture(scope="module")
def warm_start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's part 1: right on 0.35 of the held-out sums or a little more."""
    folder = tmp_path_factory.mktemp("warm")
    run("train", QUICKSTART / "sft.yaml", *ONE, f"run.dir={folder}")
    run("convert", folder / "quickstart-sft", folder / "hf", "--to", "hf")
    return folder / "hf"


def learn(folder: Path, *arguments: str | Path) -> dict[str, float]:
    """Trains, prints and returns the run's summary."""
    knobs = ("run.name=mine", f"run.dir={folder}", "log.console=false", "steps.eval_every=0")
    run("train", *arguments, *ONE, *knobs, timeout_s=500)
    found: dict[str, float] = json.loads((folder / "mine" / "summary.json").read_text())
    print(found)
    return found


@pytest.mark.full
@pytest.mark.slow
def test_online_dpo_learns_from_its_warm_start(warm_start: Path, tmp_path: Path) -> None:
    knobs = ("algorithm={name: online_dpo}", f"model.path={warm_start}", "steps.num_steps=60")
    summary = learn(tmp_path, QUICKSTART / "grpo.yaml", *knobs)
    assert summary["accuracy_after"] > summary["accuracy_before"] + RISE
    found = records(tmp_path / "mine")
    rewards = [record["reward/mean"] for record in found]
    assert mean(rewards[-10:]) > mean(rewards[:10]) + 0.05
    assert all(0 <= record["reward/uniform_groups"] < 1 for record in found)
    assert found[-1]["policy/kl"] != 0 and found[0]["preference/accuracy"] == 0.5


@pytest.mark.full
@pytest.mark.slow
def test_grpo_with_a_term_of_sft_learns_from_both(warm_start: Path, tmp_path: Path) -> None:
    summary = learn(tmp_path, MIXED, f"model.path={warm_start}", "steps.num_steps=30")
    assert summary["accuracy_after"] > summary["accuracy_before"] + RISE
    found = records(tmp_path / "mine")
    rewards, losses = ([record[key] for record in found] for key in ("reward/mean", "sft/loss"))
    assert mean(rewards[-5:]) > mean(rewards[:5])
    assert 0 < mean(losses[-5:]) < mean(losses[:5])
    assert all(record["train/skipped_steps"] == 0 for record in found)


@pytest.mark.dist
@pytest.mark.full
def test_a_mixed_run_goes_on_after_a_stop_as_without_one(tmp_path: Path) -> None:
    whole = tmp_path / "whole" / "quickstart-grpo-sft"
    run("train", MIXED, *SHORT, f"run.dir={tmp_path / 'whole'}", "--world", "2")
    shutil.copytree(whole, tmp_path / "stopped" / whole.name)
    shutil.rmtree(tmp_path / "stopped" / whole.name / "checkpoints" / "step_4")
    again = ("train", MIXED, *SHORT, f"run.dir={tmp_path / 'stopped'}", "--world", "2")
    run(*again)
    found, expected = records(tmp_path / "stopped" / whole.name), records(whole)
    assert [record["step"] for record in found] == [1, 2, 3, 4]
    timed = ("time", "slowest", "throughput", "memory", "mfu", "generate/idle_share")
    timed += ("reshard/transfer_s",)
    for one, two in zip(found, expected, strict=True):
        names = [name for name in two if not name.startswith(timed)]
        assert {name: one[name] for name in names} == {name: two[name] for name in names}
        assert one["sft/loss"] > 0 and one["sft/entropy"] > 0
    ours = exported_weights(tmp_path / "stopped" / whole.name, tmp_path / "ours")
    theirs = exported_weights(whole, tmp_path / "theirs")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)

    said = run(*again, "mix.sft.weight=0.2", expect=2)
    assert "mix.sft.weight: got 0.2" in said and "0.1, with which" in said
