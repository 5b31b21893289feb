"""Owned parts: what the ranks of a model's replicas own is everything, once, and suffices."""

from __future__ import annotations

import random
from math import prod

import pytest
from some_cases import some
from weight_cases import random_case

from hybridrl.hybrid_engine.planning.owned import (
    equal_shares,
    frozen_tensors,
    owned_layout,
    without,
)
from hybridrl.hybrid_engine.planning.plan import PlanError, plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.models.boxes import sizes, span_boxes, tiling_fault, volume
from hybridrl.models.weights import (
    RankLayout,
    Region,
    check_coverage,
    check_layout,
    hf_layout,
    hf_shapes,
)
from hybridrl.parallel.layout import TrainLayout


def shared_out(layouts: list[RankLayout], rng: random.Random) -> list[RankLayout]:
    """Cuts each tensor of equal ranks anywhere, as a flat buffer is cut, one range for each."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for rank, layout in enumerate(layouts):
        alike.setdefault(layout.regions, []).append(rank)
    ranges: list[dict[str, tuple[int, int]]] = [{} for _ in layouts]
    for ranks in alike.values():
        for name, shape in layouts[ranks[0]].shapes.items():
            size = prod(shape)
            cuts = sorted(rng.choice((0, size, rng.randint(0, size))) for _ in ranks[1:])
            for rank, start, stop in zip(ranks, [0, *cuts], [*cuts, size], strict=True):
                if start < stop:  # other ranks hear nothing of this tensor
                    ranges[rank][name] = (start, stop)
    return [owned_layout(layout, part) for layout, part in zip(layouts, ranges, strict=True)]


@pytest.mark.parametrize("seed", some(range(120), 30))
def test_owned_parts_fill_every_engine(seed: int) -> None:
    case = random_case(seed)
    whole = case.sources()
    owned = shared_out(whole, random.Random(seed))
    check_coverage(owned, hf_shapes(case.family, case.shape))
    for one, other in zip(owned, whole, strict=True):
        check_layout(one)
        assert one.shapes == other.shapes
    total = sum(volume(r.local_box) for layout in owned for r in layout.regions)
    if case.train.dp * case.train.cp == case.world:  # else tensor-parallel ranks repeat norms
        shapes = hf_shapes(case.family, case.shape).values()
        assert total == sum(prod(shape) for shape in shapes), "each element has one owner"
    plan = plan_reshard(owned, case.targets(), itemsize=2)
    prove(plan, owned, case.targets())


def test_part_that_nobody_owns_is_missed() -> None:
    case = random_case(3)
    layouts = [owned_layout(layout, {}) for layout in case.sources()]
    assert not any(layout.regions for layout in layouts)
    with pytest.raises(PlanError, match="is needed, but no rank holds it"):
        plan_reshard(layouts, case.targets(), itemsize=2)


@pytest.mark.parametrize("shape", [(7,), (4, 6), (3, 4, 5), (1, 9)])
def test_span_of_elements_is_few_boxes_that_tile_it(shape: tuple[int, ...]) -> None:
    size = prod(shape)
    for start in range(size + 1):
        for stop in range(start, size + 1):
            boxes = [*span_boxes(shape, start, stop)]
            assert sum(prod(sizes(box)) for box in boxes) == stop - start
            assert len(boxes) <= 2 * len(shape) - 1
            others = [*span_boxes(shape, 0, start), *span_boxes(shape, stop, size)]
            assert tiling_fault([*boxes, *others], shape) is None


def test_every_rank_owns_the_biases_of_its_routers() -> None:
    box, bias = ((0, 8),), "0/decoder.layers.1.mlp.router.expert_bias"
    regions = tuple(Region(f"hf {name}", box, name, box) for name in (bias, "norm"))
    whole = [RankLayout(regions, {bias: (8,), "norm": (8,)})] * 2
    for rank, one in enumerate(equal_shares(TrainLayout(2), whole)):
        owned = {region.local: region.local_box for region in one.regions}
        assert owned == {bias: box, "norm": ((4 * rank, 4 * rank + 4),)}


def test_a_tensor_is_frozen_where_no_rank_trains_a_part_and_is_left_out_of_the_plan() -> None:
    half = hf_layout({"embedding": (4, 2), "norm": (2,)})
    tied = hf_layout({"embedding": (4, 2), "bias": (3,)})
    layouts = [half, half, tied]
    assert frozen_tensors(layouts, [{"embedding"}, {"embedding"}, {"bias"}]) == {"bias"}
    frozen = frozen_tensors(layouts, [{"embedding"}, {"embedding"}, {"embedding"}])
    assert frozen == {"embedding"}
    left = without(layouts, frozen)
    assert left[0] is left[1]
    plan = plan_reshard(left, without([tied, tied, half], frozen), 2)
    prove(plan, left, without([tied, tied, half], frozen))
    assert {op.dest for ops in plan.ops for op in ops} == {"norm", "bias"}
