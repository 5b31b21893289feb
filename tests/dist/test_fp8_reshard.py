"""Engines with FP8 weights, written over real processes; the checks are in fp8_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import run_ranks

WORKER = str(Path(__file__).with_name("fp8_worker.py"))


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="the worker takes gloo")
@pytest.mark.parametrize(
    ("world", "count"),
    [
        (4, 5),
        pytest.param(8, 20, marks=pytest.mark.full),
        pytest.param(4, 60, marks=pytest.mark.full),
    ],
)
def test_fp8_weights_and_scales_equal_slices_of_quantized_hf_tensors(
    world: int, count: int
) -> None:
    run_ranks(world, WORKER, ["0", str(count)], timeout_s=400)
