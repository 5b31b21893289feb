"""A run that loses ranks for good goes on with fewer, as one with all of them would have."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import torch
import yaml
from command_line import QUICKSTART, exported_weights, run, start
from killed_ranks import KEYS, check_same, lose_a_rank, rank_process, wait_for
from test_resume import MODEL, SMALL

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


@pytest.mark.dist
@pytest.mark.full
def test_a_run_goes_on_without_its_first_rank(unbroken: Path, tmp_path: Path) -> None:
    output, took = lose_a_rank(arguments(tmp_path, *TWO_BY_TWO), tmp_path, 0)
    assert took < 60
    said = [line for line in output.splitlines() if "(run.max_restarts)" in line]
    assert ["4 ranks" in line for line in said] == [True, False], output[-4000:]
    assert "continuing with 2 ranks" in said[1]  # three cannot share tp=2
    check_same(records(tmp_path), records(unbroken))


def without_layout(folder: Path) -> Path:
    """Writes a configuration without what `layout: auto` may choose."""
    config = yaml.safe_load(CONFIG.read_text())
    for key in ("tp", "pp", "micro_batch_tokens"):
        del config["train"][key]
    del config["rollout"]["tp"]
    file = folder / "auto.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


@pytest.mark.dist
@pytest.mark.full
def test_a_chosen_layout_is_chosen_anew_for_fewer_ranks(tmp_path: Path) -> None:
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for folder in (unbroken, broken):
        folder.mkdir()
    file = without_layout(tmp_path)
    run(*arguments(unbroken, "layout=auto", config=file), "--world", "4")
    output, took = lose_a_rank(arguments(broken, "layout=auto", config=file), broken, 3)
    assert took < 60 and "continuing with 3 ranks" in output, output[-4000:]
    layout = yaml.safe_load((broken / "quickstart-grpo" / "config.yaml").read_text())["layout"]
    assert layout["choose"] == "auto" and layout["chosen_for"] == 3
    check_same(records(broken), records(unbroken))


@pytest.mark.dist
@pytest.mark.full
def test_a_run_that_goes_on_with_other_ranks_loses_one_of_them(tmp_path: Path) -> None:
    """The layout is chosen for 4 ranks, by the next command for 2, and after the loss for 1."""
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for folder in (unbroken, broken):
        folder.mkdir()
    file = without_layout(tmp_path)
    run(*arguments(unbroken, "layout=auto", config=file), "--world", "4")
    knobs = ("layout=auto", "run.max_restarts=3", "steps.num_steps=2")
    run(*arguments(broken, *knobs, config=file), "--world", "4")
    output, took = lose_a_rank(arguments(broken, "layout=auto", config=file), broken, 0, 2)
    assert took < 60 and "continuing with 1 ranks" in output, output[-4000:]
    starts = json.loads((broken / "quickstart-grpo" / "run.json").read_text())["starts"]
    assert [one["world_size"] for one in starts] == [4, 2, 1]
    layout = yaml.safe_load((broken / "quickstart-grpo" / "config.yaml").read_text())["layout"]
    assert layout["choose"] == "auto" and layout["chosen_for"] == 1
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
    assert "was found in host memory; the run continues from it" in output
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
