"""What crosses between nodes: the least that can, spread over the ranks, and on to all in need."""

from __future__ import annotations

import numpy as np
import pytest
from some_cases import some
from weight_cases import PADDING, Case, random_case

from hybridrl.hybrid_engine.planning.plan import plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.models.boxes import volume
from hybridrl.models.family import ModelShape
from hybridrl.models.weights import RankLayout, Region, hf_layout
from hybridrl.parallel.layout import RolloutLayout, TrainLayout

WORLD = 8


def least_landing(case: Case, node: range) -> tuple[int, float]:
    """Returns what a node and its busiest rank must receive at least, elements; by the values.

    What only some ranks need, divided by their number, lands on them (as in test_plan_sources.py).
    """
    hf = case.weights()
    size = sum(array.size for array in hf.values())
    needed = np.zeros(size, np.int64)
    for place, rank in enumerate(node):
        for array in case.generating(hf, rank).values():
            values = np.unique(array[array != PADDING]).astype(np.int64)
            needed[values] |= 1 << place
    for rank in node:
        for array in case.trained(hf, rank).values():
            needed[array[array != PADDING].astype(np.int64)] = 0
    demand = np.bincount(needed[needed > 0], minlength=1 << len(node))
    by_ranks = np.arange(1 << len(node))
    busiest = max(
        demand[by_ranks & ~some == 0].sum() / some.bit_count() for some in range(1, 1 << len(node))
    )
    return int(demand.sum()), busiest


@pytest.mark.parametrize("node_size", [2, 4])
@pytest.mark.parametrize("batch", some(range(4), 1))
def test_nodes_receive_the_least_bytes_spread_over_their_ranks(node_size: int, batch: int) -> None:
    num_spread = 0
    for seed in range(batch, 80, 4):
        case = random_case(seed, WORLD)
        sources, targets = case.sources(), case.targets()
        plan = plan_reshard(sources, targets, 1, node_size)
        prove(plan, sources, targets)
        largest = max(volume(r.local_box) for layout in sources for r in layout.regions)
        for start in range(0, WORLD, node_size):
            node = range(start, start + node_size)
            others = [rank for rank in range(WORLD) if rank not in node]
            landed = plan.traffic[others][:, list(node)].sum(axis=0)
            least, busiest = least_landing(case, node)
            assert landed.sum() == least, seed
            assert busiest <= landed.max() + 0.5
            assert landed.max() <= busiest + largest, seed
            num_spread += landed.sum() > 0 and np.count_nonzero(landed) > 1
        assert plan.receive_bytes == plan_reshard(sources, targets, 1).receive_bytes, seed
    assert num_spread > 5


@pytest.mark.parametrize("seed", some(range(20), 6))
def test_ranks_of_a_route_have_the_same_slices_of_it(seed: int) -> None:
    case = random_case(seed, WORLD)
    plan = plan_reshard(case.sources(), case.targets(), 2, 4)
    for stream in plan.streams:
        found = [
            sorted((op.source, op.source_box) for op in plan.ops[rank] if op.stream == stream)
            for rank in stream.route
        ]
        assert found == [found[0]] * len(found)
    for source in range(WORLD):
        for dest in range(WORLD):
            wanted = [op for op in plan.ops[dest] if op.source_rank == source]
            assert list(plan.ops_between(source, dest)) == wanted


def test_one_node_and_ranks_that_share_nothing_have_direct_ways_alone() -> None:
    shape = ModelShape(2, 16, 8, 8, 4, 64, 512, tied_embeddings=True)
    case = Case(shape, TrainLayout(WORLD, pp=2), RolloutLayout.consecutive(WORLD, 4), "fused")
    one = plan_reshard(case.sources(), case.targets(), 2, WORLD)
    assert one.ops == plan_reshard(case.sources(), case.targets(), 2).ops
    assert all(len(stream.route) == 1 for stream in one.streams)
    alone = plan_reshard(case.sources(), case.targets(), 2, 1)
    assert all(len(stream.route) == 1 for stream in alone.streams)
    two = plan_reshard(case.sources(), case.targets(), 2, 4)
    assert {len(stream.route) for stream in two.streams} == {1, 4}  # norms are for all four
    assert two.hash() != one.hash()


def test_ranks_whose_regions_are_in_another_order_get_their_own_of_a_shared_way() -> None:
    """Columns side by side, which one rank would join to one operation and the other would not."""
    source = RankLayout(
        tuple(Region(f"w{i}", ((0, 4), (0, 2)), "x", ((0, 4), (2 * i, 2 * i + 2))) for i in (0, 1)),
        {"x": (4, 4)},
    )
    joined = RankLayout(source.regions, {"x": (4, 4)})
    apart = hf_layout({"w1": (4, 2), "w0": (4, 2)})
    nothing = RankLayout((), {})
    plan = plan_reshard(
        [source, nothing, nothing, nothing], [nothing, nothing, joined, apart], 2, 2
    )
    prove(plan, [source, nothing, nothing, nothing], [nothing, nothing, joined, apart])
    assert plan.traffic[:2, 2:].sum() == 2 * 16
    for stream in plan.streams:
        one, other = (
            sorted((op.source, op.source_box) for op in plan.ops[rank] if op.stream == stream)
            for rank in (2, 3)
        )
        assert one == other and set(stream.route) == {2, 3}
