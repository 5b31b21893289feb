"""`layout: auto` in runs: chosen once, the same on all ranks, kept when a run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from command_line import QUICKSTART, run
from launch import run_ranks

CONFIG = {
    "run": {"name": "auto"},
    "model": {"init": str(QUICKSTART / "model")},
    "algorithm": {"name": "grpo"},
    "rollout": {"engine": "hf", "max_new_tokens": 8},
    "reward": {"function": "scripted_reward:digits", "isolated": False},
    "data": {"prompts": str(QUICKSTART / "train.jsonl"), "max_prompt_tokens": 6},
    "steps": {"prompts_per_step": 4, "samples_per_prompt": 2, "num_steps": 1},
    "log": {"tensorboard": False},
    "layout": "auto",
}


def resolved(folder: Path) -> dict[str, dict[str, object]]:
    found = yaml.safe_load((folder / "auto" / "config.yaml").read_text())
    return {section: found[section] for section in ("train", "rollout", "layout")}


@pytest.mark.dist
def test_a_layout_is_chosen_once_and_kept_when_the_run_goes_on(tmp_path: Path) -> None:
    file, ours = tmp_path / "a.yaml", tmp_path / "ours"
    file.write_text(yaml.safe_dump(CONFIG))
    told = run("train", file, f"run.dir={ours}", "--world", "2")
    assert "layout: auto chose train.tp=1" in told
    first = resolved(ours)
    assert first["layout"]["choose"] == "auto" and first["layout"]["chosen_for"] == 2
    # What no search would choose, as another version might have: the run keeps it.
    saved = ours / "auto" / "config.yaml"
    content = yaml.safe_load(saved.read_text())
    content["train"]["tp"] = 2
    saved.write_text(yaml.safe_dump(content))
    run("train", file, f"run.dir={ours}", "steps.num_steps=2", "--world", "2")
    assert resolved(ours)["train"]["tp"] == 2
    # Ranks that another launcher has started choose for themselves.
    arguments = ["train", str(file), f"run.dir={tmp_path / 'theirs'}"]
    run_ranks(2, "hybridrl.cli.main", arguments, timeout_s=180)
    assert resolved(tmp_path / "theirs") == first
