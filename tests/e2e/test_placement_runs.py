"""Runs whose models lie on ranks of their own, from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import QUICKSTART, run

DISJOINT = ("train.pp=1", "placement.policy=0-1", "placement.rollout=2-3")


@pytest.mark.dist
def test_a_placed_run_is_evaluated_and_goes_on_elsewhere(tmp_path: Path) -> None:
    """From the configuration that its run folder keeps, which names every role."""
    knobs = (
        "run.name=placed",
        f"run.dir={tmp_path}",
        "model.path=null",
        f"model.init={QUICKSTART / 'model'}",
        "data.eval_limit=4",
        "steps.eval_every=0",
        "steps.prompts_per_step=4",
        "steps.num_steps=2",
        "train.tp=1",
        "log.tensorboard=false",
    )
    run("train", QUICKSTART / "grpo.yaml", *knobs, *DISJOINT, timeout_s=200)
    kept = tmp_path / "placed" / "config.yaml"
    said = run("eval", kept, "--json", timeout_s=200).splitlines()
    (found,) = (json.loads(line) for line in said if line.startswith("{"))
    assert found["num_prompts"] == 4
    elsewhere = ("placement.policy=1", "placement.rollout=0", "steps.num_steps=3")
    run("train", kept, *elsewhere, timeout_s=200)
    steps = (tmp_path / "placed" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in steps] == [1, 2, 3]


@pytest.mark.dist
@pytest.mark.full  # the same numbers as where all is shared: tests/dist/test_placement.py
@pytest.mark.slow
@pytest.mark.timeout(1200, func_only=True)
def test_the_quickstart_learns_on_ranks_apart(warm_start: Path, tmp_path: Path) -> None:
    given = (f"model.path={warm_start}", f"run.dir={tmp_path}", "steps.num_steps=120")
    run("train", QUICKSTART / "grpo.yaml", *given, *DISJOINT, timeout_s=1100)
    summary = json.loads((tmp_path / "quickstart-grpo" / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.6 and summary["accuracy_after"] > 0.85, summary
