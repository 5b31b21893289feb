"""Exchanges of a plan: bounded, complete, and known alike at both ends of every message."""

from __future__ import annotations

from dataclasses import replace

import pytest
from weight_cases import Case, random_case

from hybridrl.hybrid_engine.planning.chunks import Exchange, Part, schedule_exchanges
from hybridrl.hybrid_engine.planning.plan import Plan, PlanError, plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.models.boxes import volume
from hybridrl.models.family import ModelShape
from hybridrl.parallel.layout import RolloutLayout, TrainLayout

SHAPE = ModelShape(4, 16, 8, 2, 4, 32, 100)
CASE = Case(SHAPE, TrainLayout(4, tp=2, pp=2), RolloutLayout.consecutive(4, 1), engine="hf")


def sent(exchange: Exchange) -> list[Part]:
    return [part for parts in exchange.sends.values() for part in parts]


def received(exchange: Exchange) -> list[Part]:
    return [part for parts in exchange.receives.values() for part in parts]


def slices(part: Part) -> list[tuple[object, ...]]:
    return [(piece.source_rank, piece.source, piece.source_box) for piece in part.pieces]


def check_messages(plan: Plan, ranks: list[list[Exchange]]) -> int:
    """Checks that both ends of every message know the same; returns how many parts go on."""
    num_passed_on = 0
    for number in range(len(ranks[0])):
        for rank, exchanges in enumerate(ranks):
            for peer, parts in exchanges[number].sends.items():
                arriving = ranks[peer][number].receives[rank]
                assert [(p.stream, p.elements) for p in parts] == [
                    (p.stream, p.elements) for p in arriving
                ]
                landed = {p.stream: p for p in received(exchanges[number - 1])} if number else {}
                for part, arrived in zip(parts, arriving, strict=True):
                    is_passed_on = part.stream.source != rank
                    num_passed_on += is_passed_on
                    assert not (is_passed_on and part.pieces)
                    there = landed[part.stream] if is_passed_on else part
                    assert there.elements == part.elements
                    assert slices(there) == slices(arrived)
                    assert sum(volume(op.dest_box) for op in arrived.pieces) == part.elements
            assert all(rank in ranks[peer][number].sends for peer in exchanges[number].receives)
    return num_passed_on


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    ("world", "node", "capacity_bytes"),
    [
        (2, 2, 2),
        (4, 4, 50),
        (4, 2, 100),
        (8, 8, 600),
        (8, 4, 1000),
        (8, 2, 4096),
        (8, 3, 4096),
        (8, 4, 1 << 30),
    ],
)
def test_exchanges_hold_the_whole_plan_within_the_capacity(
    seed: int, world: int, node: int, capacity_bytes: int
) -> None:
    case = random_case(seed, world)
    plan = plan_reshard(case.sources(), case.targets(), 2, node)
    ranks = [schedule_exchanges(plan, rank, capacity_bytes) for rank in range(world)]
    assert len({len(exchanges) for exchanges in ranks}) == 1
    for exchange in (exchange for exchanges in ranks for exchange in exchanges):
        assert 2 * sum(part.elements for part in sent(exchange)) <= capacity_bytes
        assert 2 * sum(part.elements for part in received(exchange)) <= capacity_bytes
    check_messages(plan, ranks)
    pieces = [
        [op for op in plan.ops[rank] if op.source_rank == rank]
        + [
            piece
            for exchange in ranks[rank]
            for part in received(exchange)
            for piece in part.pieces
        ]
        for rank in range(world)
    ]
    prove(replace(plan, ops=tuple(map(tuple, pieces))), case.sources(), case.targets())


def test_exchanges_are_few_where_everything_fits() -> None:
    plan = plan_reshard(CASE.sources(), CASE.targets(), itemsize=2)
    assert len(schedule_exchanges(plan, 0, 1 << 30)) == 1
    busiest = max(*plan.send_bytes, *plan.receive_bytes)
    assert len(schedule_exchanges(plan, 0, busiest // 8)) <= 10  # what streams round up to


def test_parts_go_on_in_one_exchange_more() -> None:
    plan = plan_reshard(CASE.sources(), CASE.targets(), 2, 2)
    ranks = [schedule_exchanges(plan, rank, 1 << 30) for rank in range(4)]
    assert [len(exchanges) for exchanges in ranks] == [2] * 4
    assert check_messages(plan, ranks) > 0


def test_exchanges_refuse_staging_without_room_for_every_stream() -> None:
    plan = plan_reshard(CASE.sources(), CASE.targets(), itemsize=4)
    with pytest.raises(PlanError, match="11 bytes per direction.*3 streams need at least 12.*mib"):
        schedule_exchanges(plan, 0, 11)
    assert schedule_exchanges(plan, 0, 12)
