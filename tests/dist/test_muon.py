"""Muon against torch's own, in several layouts; the checks are in muon_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import run_ranks

WORKER = str(Path(__file__).with_name("muon_worker.py"))


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="the worker takes NCCL on GPU hosts")
@pytest.mark.parametrize("cases", ["some", pytest.param("more", marks=pytest.mark.full)])
def test_muon_steps_are_those_of_whole_matrices(cases: str, tmp_path: Path) -> None:
    """`some` divides matrices over tensor-parallel, data-parallel and expert-parallel ranks, and
    its states pass through stages; `more` has other layouts and families.
    """
    run_ranks(4, WORKER, [str(tmp_path), cases], timeout_s=400)
