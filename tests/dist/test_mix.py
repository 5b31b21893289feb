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
@pytest.mark.parametrize("cases", ["gradients", pytest.param("more", marks=pytest.mark.full)])
def test_four_ranks_train_a_mixed_loss(cases: str, tmp_path: Path) -> None:
    run_ranks(4, WORKER, [str(tmp_path), cases], timeout_s=400)


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_of_a_mixed_loss_rest_skip_and_go_on(ranks: int, tmp_path: Path) -> None:
    """Two replicas, which share the rows of a term; with four ranks each is cut in two."""
    run_ranks(ranks, WORKER, [str(tmp_path), "steps"], timeout_s=400)
