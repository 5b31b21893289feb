"""The packed transport and the export over real processes; the checks are in reshard_worker.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch import run_ranks

LOST_RANK_WORKER = str(Path(__file__).with_name("lost_rank_worker.py"))
WORKER = str(Path(__file__).with_name("reshard_worker.py"))


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="the worker takes NCCL on GPU hosts")
def test_reshard_over_gloo_equals_hf_slices_and_sends_what_is_planned(tmp_path: Path) -> None:
    # Case 36 is one where something lands where something else comes later.
    run_ranks(4, WORKER, [str(tmp_path), "31", "7", "4"], timeout_s=300)


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="the worker takes NCCL on GPU hosts")
def test_reshard_between_two_nodes_crosses_once_and_equals_hf_slices(tmp_path: Path) -> None:
    run_ranks(8, WORKER, [str(tmp_path), "0", "5", "4"], timeout_s=400)


# The same with more random layouts; tests/unit/test_plan_reshard.py has hundreds of plans.
@pytest.mark.full
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="the worker takes NCCL on GPU hosts")
@pytest.mark.parametrize(("world", "count"), [(4, 40), (8, 16)])
def test_reshard_in_more_layouts(world: int, count: int, tmp_path: Path) -> None:
    run_ranks(world, WORKER, [str(tmp_path), "0", str(count), "4"], timeout_s=400)


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="the worker takes NCCL on GPU hosts")
@pytest.mark.parametrize(
    ("world", "first", "count", "node"),
    [
        (4, 0, 1, 4),
        pytest.param(4, 1, 22, 4, marks=pytest.mark.full),
        pytest.param(8, 0, 8, 4, marks=pytest.mark.full),
    ],
)
def test_reshard_brings_each_expert_to_the_ranks_that_need_it(
    world: int, first: int, count: int, node: int, tmp_path: Path
) -> None:
    arguments = [str(tmp_path), str(first), str(count), str(node), "experts"]
    run_ranks(world, WORKER, arguments, timeout_s=400)


@pytest.mark.dist
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_reshard_over_nccl_equals_hf_slices_and_sends_what_is_planned(tmp_path: Path) -> None:
    world = min(4, torch.cuda.device_count())
    run_ranks(world, WORKER, [str(tmp_path), "0", "40", str(world)], timeout_s=300)


@pytest.mark.dist
@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
def test_reshard_over_nccl_between_nodes_crosses_once(tmp_path: Path) -> None:
    world = 8 if torch.cuda.device_count() >= 8 else 4
    run_ranks(world, WORKER, [str(tmp_path), "0", "16", str(world // 2)], timeout_s=300)


@pytest.mark.dist
@pytest.mark.skipif(0 < torch.cuda.device_count() < 4, reason="needs four GPUs, or none")
@pytest.mark.parametrize("kind", ["packed", "peer"])
def test_a_rank_lost_in_the_middle_leaves_no_engine_with_half_the_weights(kind: str) -> None:
    run_ranks(4, LOST_RANK_WORKER, [kind, "-", "-", "4"], timeout_s=90)
