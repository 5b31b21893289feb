"""Which rank generates with which part: against every possible assignment, and known minima."""

from __future__ import annotations

from itertools import permutations

import pytest
from clock import is_within
from weight_cases import random_case

from hybridrl.hybrid_engine.planning.assign import assign, choose_order, evaluate_layout
from hybridrl.hybrid_engine.planning.plan import plan_reshard
from hybridrl.models.boxes import volume
from hybridrl.models.family import ModelShape, resolve_family
from hybridrl.models.weights import RankLayout, fused_layout, megatron_layout
from hybridrl.parallel.layout import RolloutLayout, TrainLayout

QWEN2 = resolve_family("qwen2", {})
QWEN25_7B = ModelShape(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True)
LLAMA3_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
GB = 2 / 1e9  # an element in 16 bit


def layouts(
    shape: ModelShape, train: TrainLayout, tp: int
) -> tuple[list[RankLayout], list[RankLayout]]:
    ranks = range(train.world_size)
    parts = [fused_layout(QWEN2, shape, tp, tp_rank) for tp_rank in range(tp)]
    return [megatron_layout(QWEN2, shape, train, rank) for rank in ranks], parts


def replicas(layout: RolloutLayout) -> list[list[int]]:
    """Returns the ranks of each replica in tensor-parallel order."""
    rank_of = {place: rank for rank, place in enumerate(layout.assignment)}
    return [
        [rank_of[replica, tp_rank] for tp_rank in range(layout.tp)]
        for replica in range(layout.replicas)
    ]


def every_layout(size: int, tp: int) -> list[RolloutLayout]:
    places = RolloutLayout.consecutive(size, tp).assignment
    return [RolloutLayout(tp, order) for order in permutations(places)]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_assignment_is_the_best_of_all(seed: int, tp: int) -> None:
    """Every assignment of 4 ranks is planned; receivers are exact, senders to one slice."""
    case, tried = random_case(seed, world=4), seed
    while tp not in (1, case.rollout.tp):  # a shape that an engine can cut so
        tried += 100
        case = random_case(tried, world=4)
    sources = case.sources()
    parts = [fused_layout(case.family, case.shape, tp, tp_rank) for tp_rank in range(tp)]
    largest = max(volume(r.local_box) for layout in sources for r in layout.regions)
    receivers: dict[bool, list[int]] = {True: [], False: []}
    for layout in every_layout(4, tp):
        plan = plan_reshard(sources, [parts[place] for _, place in layout.assignment], 1)
        is_ascending = all(members == sorted(members) for members in replicas(layout))
        for rule in {False, is_ascending}:
            receivers[rule].append(max(plan.receive_bytes))
        judged = evaluate_layout(sources, parts, layout)
        assert judged.receive == max(plan.receive_bytes)
        assert judged.send <= max(plan.send_bytes) + 1
        assert max(plan.send_bytes) <= judged.send + largest
    for rule, found in receivers.items():
        best = assign(sources, parts, is_ascending=rule)
        assert best.receive == min(found)
        if rule:
            assert all(members == sorted(members) for members in replicas(best.layout))


@pytest.mark.parametrize(
    ("train", "tp", "least", "least_in_any_order"),
    [
        (TrainLayout(4, tp=4), 2, 3.81, 3.81),
        (TrainLayout(4, tp=4), 4, 0, 0),
        (TrainLayout(4, tp=2, pp=2), 2, 3.81, 3.81),
        (TrainLayout(4, tp=2, pp=2), 4, 3.81, 1.90),
        (TrainLayout(4, pp=4), 2, 5.98, 5.98),
        (TrainLayout(4, pp=4), 4, 2.99, 2.99),
        (TrainLayout(4, tp=2), 2, 0, 0),
        (TrainLayout(4, tp=2), 4, 3.81, 0),
        (TrainLayout(4, pp=2), 4, 1.90, 1.90),
    ],
)
def test_assignment_reaches_the_known_minima_of_a_7b_model(
    train: TrainLayout, tp: int, least: float, least_in_any_order: float
) -> None:
    """Minimum gigabytes, counted on their own from the parameters of Qwen2.5-7B."""
    sources, parts = layouts(QWEN25_7B, train, tp)
    assert assign(sources, parts).receive * GB == pytest.approx(least, abs=0.007)
    free = assign(sources, parts, is_ascending=False)
    assert free.receive * GB == pytest.approx(least_in_any_order, abs=0.007)


def test_strided_replicas_halve_what_consecutive_ones_receive() -> None:
    sources, parts = layouts(QWEN25_7B, TrainLayout(4, tp=4), 2)
    best = assign(sources, parts)
    assert replicas(best.layout) == [[0, 2], [1, 3]]
    consecutive = evaluate_layout(sources, parts, RolloutLayout.consecutive(4, 2))
    assert consecutive.receive == pytest.approx(2 * best.receive, rel=1e-3)


@pytest.mark.parametrize("train", [TrainLayout(4, tp=2, pp=2), TrainLayout(4, tp=2)])
def test_another_order_of_the_training_axes_makes_up_for_ascending_ranks(
    train: TrainLayout,
) -> None:
    sources, parts = layouts(QWEN25_7B, train, 4)
    free = assign(sources, parts, is_ascending=False)
    assert free.layout.assignment == ((0, 0), (0, 2), (0, 1), (0, 3))
    moved = TrainLayout(4, train.tp, train.pp, order=choose_order(train, sources, parts).order)
    assert assign(*layouts(QWEN25_7B, moved, 4)).cost == free.cost
    assert assign(sources, parts).cost > free.cost


def test_no_order_is_chosen_that_takes_a_tensor_parallel_group_off_its_node() -> None:
    train = TrainLayout(32, tp=8, pp=2)
    sources, parts = layouts(LLAMA3_8B, train, 16)
    free = assign(sources, parts, 8, is_ascending=False)
    assert free.cost < assign(sources, parts, 8).cost
    assert choose_order(train, sources, parts, 8).order == train.order
    assert choose_order(train, sources, parts).order != train.order


@pytest.mark.parametrize(
    ("train", "tp", "domain_size", "span"),
    [
        (TrainLayout(32, tp=8, pp=2), 4, 8, 1),
        (TrainLayout(32, tp=8, pp=2), 2, 4, 1),
        (TrainLayout(32, tp=4, pp=2), 8, 8, 1),
        (TrainLayout(32, tp=4, pp=2), 16, 8, 2),
        (TrainLayout(24, tp=2, pp=4), 4, 6, 2),
    ],
)
@pytest.mark.parametrize("is_ascending", [True, False])
def test_replicas_span_as_few_nodes_as_they_can(
    train: TrainLayout, tp: int, domain_size: int, span: int, is_ascending: bool
) -> None:
    sources, parts = layouts(LLAMA3_8B, train, tp)
    best = assign(sources, parts, domain_size, is_ascending)
    for members in replicas(best.layout):
        assert len({rank // (span * domain_size) for rank in members}) == 1
        assert members == sorted(members) or not is_ascending
    consecutive = evaluate_layout(sources, parts, RolloutLayout.consecutive(train.world_size, tp))
    assert best.cost <= consecutive.cost


def test_large_nodes_are_matched_to_the_optimum_in_any_order() -> None:
    """Where each rank can have the part that it misses least of, the matching finds that."""
    train = TrainLayout(16, tp=4, pp=2)
    sources, parts = layouts(LLAMA3_8B, train, 8)
    free = assign(sources, parts, 16, is_ascending=False)
    least = [plan_reshard(sources, [part] * 16, 1).receive_bytes for part in parts]
    assert free.receive == max(min(of_rank) for of_rank in zip(*least, strict=True))
    assert free.receive < assign(sources, parts, 16).receive


@pytest.mark.parametrize("is_ascending", [True, False])
@pytest.mark.parametrize(
    ("train", "tp"),
    [
        (TrainLayout(8, tp=4, pp=2), 2),
        (TrainLayout(8, tp=2, pp=2), 4),
        (TrainLayout(8, tp=2, pp=4), 8),
    ],
)
def test_exact_search_takes_under_half_a_second(
    train: TrainLayout, tp: int, is_ascending: bool
) -> None:
    shape = LLAMA3_8B if tp == 8 else QWEN25_7B  # 28 heads cannot be cut in 8
    sources, parts = layouts(shape, train, tp)
    assert is_within(0.5, lambda: assign(sources, parts, is_ascending=is_ascending))


def test_a_layout_is_laid_on_some_ranks_of_a_larger_world() -> None:
    placed = RolloutLayout.consecutive(2, 2).on((1, 3), 4)
    assert placed.assignment == (None, (0, 0), None, (0, 1)) and placed.ranks == (1, 3)
    assert placed.replicas == 1 and placed.tp_rank(0) is None and placed.place(3) == (0, 1)
    with pytest.raises(ValueError, match=r"rank 0 has no engine; ranks with engines: \(1, 3\)"):
        placed.place(0)
