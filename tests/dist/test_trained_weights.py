"""Gathers after the reshard and weights freed during rollout; checks: trained_weights_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import run_ranks

WORKER = str(Path(__file__).with_name("trained_weights_worker.py"))


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="the worker takes NCCL on GPU hosts")
@pytest.mark.parametrize("cases", ["some", "parts", pytest.param("more", marks=pytest.mark.full)])
def test_late_gathers_and_freed_weights_change_no_bit(cases: str, tmp_path: Path) -> None:
    """`some` has each kind of parallelism and type and each way to free; `more`, other layouts;
    `parts`, parameters that checkpoints store in parts.
    """
    run_ranks(4, WORKER, [str(tmp_path), cases], timeout_s=400)
