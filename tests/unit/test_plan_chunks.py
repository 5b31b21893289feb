"""Chunks of a plan: bounded, complete, in an order that both ends of a message know."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from weight_cases import Case, random_case

from hybridrl.hybrid_engine.chunks import schedule_chunks
from hybridrl.hybrid_engine.plan import PlanError, plan_reshard
from hybridrl.hybrid_engine.proof import prove
from hybridrl.models.boxes import volume
from hybridrl.models.family import ModelShape
from hybridrl.parallel.layout import RolloutLayout, TrainLayout

SHAPE = ModelShape(4, 16, 8, 2, 4, 32, 100)
CASE = Case(SHAPE, TrainLayout(4, tp=2, pp=2), RolloutLayout.consecutive(4, 1), engine="hf")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("world", "capacity_bytes"), [(2, 2), (4, 50), (8, 600), (4, 4096), (8, 4096), (8, 1 << 30)]
)
def test_chunks_hold_the_whole_plan_within_the_capacity(
    seed: int, world: int, capacity_bytes: int
) -> None:
    case = random_case(seed, world)
    plan = plan_reshard(case.sources(), case.targets(), itemsize=2)
    chunks = schedule_chunks(plan, capacity_bytes)
    for chunk in chunks:
        sent, received = Counter(), Counter()
        for piece in chunk:
            sent[piece.source_rank] += 2 * volume(piece.source_box)
            received[piece.dest_rank] += 2 * volume(piece.dest_box)
        assert chunk
        assert max(sent.values()) <= capacity_bytes
        assert max(received.values()) <= capacity_bytes
    pieces = [[op for op in ops if op.source_rank == rank] for rank, ops in enumerate(plan.ops)]
    for chunk in chunks:
        for piece in chunk:
            pieces[piece.dest_rank].append(piece)
    prove(replace(plan, ops=tuple(map(tuple, pieces))), case.sources(), case.targets())


def test_chunks_are_few_where_everything_fits() -> None:
    plan = plan_reshard(CASE.sources(), CASE.targets(), itemsize=2)
    assert len(schedule_chunks(plan, 1 << 30)) == 1
    busiest = max(*plan.send_bytes, *plan.receive_bytes)
    capacity = busiest // 8
    assert len(schedule_chunks(plan, capacity)) <= 16  # at worst half full


def test_chunks_refuse_staging_without_room_for_an_element() -> None:
    plan = plan_reshard(CASE.sources(), CASE.targets(), itemsize=4)
    with pytest.raises(PlanError, match="staging of 3 bytes holds no element of 4"):
        schedule_chunks(plan, 3)
