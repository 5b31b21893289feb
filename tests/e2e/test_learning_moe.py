"""The quickstart with a mixture of experts, dealt to four ranks: both parts, from a model made from
scratch to right answers on held-out sums.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import QUICKSTART, run

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2400)]


def test_a_mixture_of_experts_learns_the_sums(tmp_path: Path) -> None:
    knobs = (f"run.dir={tmp_path}", "log.tensorboard=false")
    run("train", QUICKSTART / "moe_sft.yaml", *knobs, timeout_s=600)
    run("convert", tmp_path / "quickstart-moe-sft", tmp_path / "hf", "--to", "hf")
    path = f"model.path={tmp_path / 'hf'}"
    replay = "algorithm.router_replay=rollout"
    run("train", QUICKSTART / "moe.yaml", path, replay, *knobs, timeout_s=1700)
    folder = tmp_path / "quickstart-moe"
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["accuracy_before"] < 0.6
    assert summary["accuracy_after"] > 0.9
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [step for step in steps if "moe/unused_experts" in step]
    assert len(trained) == 200
    assert {step["router/replayed_share"] for step in trained} == {1.0}
    # Of 8 experts 2 work on a token: one that works on all has 4 times the mean.
    assert max(step["moe/max_load"] for step in trained) < 4
