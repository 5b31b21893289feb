"""PPO's `critic_warmup_steps`: first the critic learns alone, then both do."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks

WORKER = str(Path(__file__).with_name("critic_warmup_worker.py"))


@pytest.mark.dist
def test_the_policy_stays_bit_for_bit_until_the_critic_is_warm(tmp_path: Path) -> None:
    run_ranks(2, WORKER, [str(tmp_path)], timeout_s=240)
