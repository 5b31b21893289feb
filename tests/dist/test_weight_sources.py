"""Engines written from other sources than parameters; the checks: weight_sources_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import run_ranks

WORKER = str(Path(__file__).with_name("weight_sources_worker.py"))


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="the worker takes NCCL on GPU hosts")
def test_computed_weights_arrive_by_slices_and_frozen_ones_once(tmp_path: Path) -> None:
    run_ranks(2, WORKER, [str(tmp_path)], timeout_s=200)
