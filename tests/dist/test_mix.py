"""Terms beside the main algorithm, on real Megatron: gradients, weight 0, resuming, skipped steps.

The checks are in mix_worker.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import run_ranks

WORKER = str(Path(__file__).with_name("mix_worker.py"))


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("cases", ["some", pytest.param("more", marks=pytest.mark.full)])
def test_four_ranks_train_a_mixed_loss(cases: str, tmp_path: Path) -> None:
    run_ranks(4, WORKER, [str(tmp_path), cases], timeout_s=400)
