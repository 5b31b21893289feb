"""Gathers after the reshard and weights freed during rollout; checks: trained_weights_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import run_ranks

WORKER = str(Path(__file__).with_name("trained_weights_worker.py"))


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="the worker takes NCCL on GPU hosts")
def test_late_gathers_and_freed_weights_change_no_bit(tmp_path: Path) -> None:
    run_ranks(4, WORKER, [str(tmp_path)], timeout_s=400)
