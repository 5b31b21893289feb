"""Who sends what: balanced to the optimum, and within the node where that is possible."""

from __future__ import annotations

import random

import numpy as np
import pytest
from some_cases import some
from weight_cases import PADDING, Arrays, random_case

from hybridrl.hybrid_engine.planning.plan import plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.hybrid_engine.planning.senders import Demand, balance_senders
from hybridrl.models.boxes import volume

NUM_CASES, NUM_BATCHES = 240, 8


def holders(arrays: list[Arrays], size: int) -> np.ndarray:
    """Returns for each HF element, known by its value, the bits of the ranks that have it."""
    bits = np.zeros(size, np.int64)
    for rank, tensors in enumerate(arrays):
        has = np.zeros(size, bool)
        for array in tensors.values():
            has[array[array != PADDING].astype(np.int64)] = True
        bits |= has.astype(np.int64) << rank
    return bits


def least_largest_sender(held: np.ndarray, needed: np.ndarray, world: int) -> float:
    """Returns the optimum of the linear program that spreads sending over the owners, elements.

    By duality: what can come only from a set of ranks, over the size of the set; the largest.
    """
    demand = np.zeros(1 << world)
    for rank in range(world):
        missing = ((needed >> rank) & 1 == 1) & ((held >> rank) & 1 == 0)
        demand += np.bincount(held[missing], minlength=1 << world)
    owners = np.arange(1 << world)
    return max(
        demand[owners & ~subset == 0].sum() / subset.bit_count() for subset in range(1, 1 << world)
    )


@pytest.mark.parametrize("batch", some(range(NUM_BATCHES), 2))
def test_largest_sender_is_within_a_slice_of_the_linear_programs_optimum(batch: int) -> None:
    for seed in range(batch, NUM_CASES, NUM_BATCHES):
        case = random_case(seed)
        sources, targets = case.sources(), case.targets()
        hf = case.weights()
        size = sum(array.size for array in hf.values())
        held = holders([case.trained(hf, rank) for rank in range(case.world)], size)
        needed = holders([case.generating(hf, rank) for rank in range(case.world)], size)
        plan = plan_reshard(sources, targets, itemsize=1)
        bound = least_largest_sender(held, needed, case.world)
        largest = max(volume(r.local_box) for layout in sources for r in layout.regions)
        assert bound <= max(plan.send_bytes) + 0.5
        assert max(plan.send_bytes) <= bound + largest, seed


@pytest.mark.parametrize("domain_size", [1, 2, 4])
def test_sources_are_of_the_own_node_where_it_has_any(domain_size: int) -> None:
    num_crossing = 0
    for seed in range(20):
        case = random_case(seed, world=8)
        sources, targets = case.sources(), case.targets()
        plan = plan_reshard(sources, targets, 2, domain_size)
        prove(plan, sources, targets)
        free = plan_reshard(sources, targets, 2)
        assert plan.receive_bytes == free.receive_bytes
        held = [{(r.hf, r.hf_box): r for r in layout.regions} for layout in sources]
        regions = [{r.local: r for r in layout.regions} for layout in sources]
        for rank, ops in enumerate(plan.ops):
            node = range(rank - rank % domain_size, rank - rank % domain_size + domain_size)
            for op in ops:
                source = regions[op.source_rank][op.source]
                if op.source_rank not in node and source.local_box == op.source_box:
                    num_crossing += 1
                    assert not any((source.hf, source.hf_box) in held[near] for near in node)
    assert num_crossing > 30


@pytest.mark.parametrize("seed", some(range(50), 15))
def test_senders_reach_the_optimum_where_sets_of_senders_overlap(seed: int) -> None:
    """Sets of senders that cross, sizes from 1 to 1000; every item is sent once."""
    rng = random.Random(seed)
    world = rng.choice((3, 5, 8))
    demands = []
    for _ in range(rng.randint(1, 20)):
        senders = sorted(rng.sample(range(world), rng.randint(1, world)))
        receivers = rng.sample(range(world), rng.randint(1, world))
        size = rng.choice((1, 10, 100, 1000))
        demands.append(Demand(receivers, np.array(senders), rng.randint(1, 30), size))
    loads = balance_senders(demands, world)
    traffic = np.zeros((world, world), np.int64)
    for demand in demands:
        assert demand.send_counts.min() >= 0 and demand.send_counts.sum() == demand.total
        demand.add_traffic(traffic)
        counted = [demand.senders_to(position) for position in range(len(demand.receivers))]
        assert all(len(found) == demand.count for found in counted)
        sent = [sum(c.count(s) for c in counted) for s in demand.senders]
        assert sent == demand.send_counts.tolist()
    assert traffic.sum(axis=1).tolist() == loads.tolist()
    bound = max(
        sum(d.total * d.size for d in demands if all(subset >> s & 1 for s in d.senders.tolist()))
        / subset.bit_count()
        for subset in range(1, 1 << world)
    )
    assert bound <= max(loads) <= bound + max(demand.size for demand in demands)
