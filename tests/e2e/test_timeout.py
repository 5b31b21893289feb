"""A rank that hangs: the others wait for `run.collective_timeout_s` and the command says who."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from command_line import QUICKSTART, run


@pytest.mark.dist
def test_hanging_rank_ends_the_command_after_the_collective_timeout(tmp_path: Path) -> None:
    started = time.monotonic()
    output = run(
        "train",
        QUICKSTART / "grpo.yaml",
        "model.path=null",
        f"model.init={QUICKSTART / 'model'}",
        "train.tp=1",
        "train.pp=1",
        "data.eval_prompts=null",
        "steps.eval_every=0",
        "steps.prompts_per_step=4",
        "reward.function=scripted_reward:hangs_on_rank_1",
        "reward.isolated=false",
        "reward.extract=null",
        "run.collective_timeout_s=8",
        f"run.dir={tmp_path}",
        "--world",
        "2",
        expect=1,
    )
    assert time.monotonic() - started < 8 + 30 + 20  # the bound, to end the command, to start it
    assert "rank 0" in output and "reward" in output, output[-2000:]
