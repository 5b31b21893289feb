"""Block FP8 through both transports, in real processes; the checks are in quantized_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks

WORKER = str(Path(__file__).with_name("quantized_worker.py"))


@pytest.mark.full
@pytest.mark.dist
def test_quantized_parameters_equal_quantized_hf_slices_in_both_transports() -> None:
    run_ranks(4, WORKER, [], timeout_s=300)
