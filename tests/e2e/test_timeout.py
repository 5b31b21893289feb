"""A rank that hangs in a user's code: named and given up after `run.stall_timeout_s`."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from command_line import FRESH, NO_EVALUATION, QUICKSTART, run


@pytest.mark.dist
@pytest.mark.waits
def test_hanging_rank_is_named_after_the_stall_timeout_with_its_stack(tmp_path: Path) -> None:
    started = time.monotonic()
    output = run(
        "train",
        QUICKSTART / "grpo.yaml",
        *FRESH,
        *NO_EVALUATION,
        "steps.prompts_per_step=4",
        "reward.function=scripted_reward:hangs_on_rank_1",
        "reward.isolated=false",
        "reward.extract=null",
        "run.collective_timeout_s=4",
        "run.stall_timeout_s=8",
        f"run.dir={tmp_path}",
        "--world",
        "2",
        expect=1,
    )
    assert time.monotonic() - started < 8 + 30 + 20  # the bound, to end the command, to start it
    (said,) = (line for line in output.splitlines() if line.startswith("hybridrl:"))
    assert said.startswith("hybridrl: rank 1 on host ") and "'reward, step 1'" in said, said
    assert "scripted_reward.py" in said and "in hangs_on_rank_1" in said, said
    assert "run.stall_timeout_s=8" in said and "rank_1.log" in said, said
    assert f"all ranks: {tmp_path}/quickstart-grpo/hangs/step_1.txt" in said, said
    assert "Traceback" not in output, output[-4000:]
    logs = tmp_path / "quickstart-grpo" / "logs"
    assert "in hangs_on_rank_1" in (logs / "rank_1.log").read_text()
    other = (logs / "rank_0.log").read_text()
    assert "in all_agree" in other and said in other
