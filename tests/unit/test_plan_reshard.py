"""The planner against references that know nothing of regions, over many random layouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from clock import is_within
from some_cases import some
from weight_cases import (
    Case,
    minimum_receive_elements,
    random_case,
    random_case_with_experts,
    random_placed_case,
    run_plan,
)

from hybridrl.hybrid_engine.planning.assign import assign
from hybridrl.hybrid_engine.planning.plan import PlanError, plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.models.boxes import volume
from hybridrl.models.family import ModelShape, MoeShape, read_model, resolve_family
from hybridrl.models.weights import (
    RankLayout,
    Region,
    check_coverage,
    fused_layout,
    fused_layouts,
    hf_layout,
    hf_shapes,
    megatron_layout,
)
from hybridrl.parallel.layout import TrainLayout

NUM_CASES, NUM_BATCHES, NUM_PLACED_CASES = 640, 16, 300
NUM_EXPERT_CASES = 300
QWEN25_7B = ModelShape(
    num_layers=28,
    hidden_size=3584,
    num_heads=28,
    num_kv_heads=4,
    head_dim=128,
    ffn_size=18944,
    vocab_size=152064,
    qkv_bias=True,
)


@pytest.mark.parametrize("batch", some(range(NUM_BATCHES), 4))
def test_plan_gives_engines_the_slices_of_hf_tensors(batch: int) -> None:
    """Bitwise equal tensors, fewest bytes received, proven, senders balanced."""
    for seed in range(batch, NUM_CASES, NUM_BATCHES):
        check_plan(random_case(seed), seed)


@pytest.mark.parametrize("batch", some(range(4), 1))
def test_plan_between_rank_sets_that_differ(batch: int) -> None:
    """The same where some ranks only give and some only receive."""
    kinds = set()
    for seed in range(batch, NUM_PLACED_CASES, 4):
        case = random_placed_case(seed)
        check_plan(case, seed)
        trains, generates = set(case.trains), set(case.rollout.ranks)
        kinds.add((bool(trains & generates), trains <= generates, trains >= generates))
    assert len(kinds) == 5, kinds  # disjoint, overlapping, equal, one within the other


@pytest.mark.parametrize("batch", some((3, 0, 1, 2), 1))
def test_plan_brings_each_expert_to_the_ranks_that_need_it(batch: int) -> None:
    """The same with experts: dealt or cut in training, cut or whole in the engine."""
    kinds = set()
    for seed in range(batch, NUM_EXPERT_CASES, 4):
        case = random_case_with_experts(seed)
        check_plan(case, seed)
        whole = case.rollout_ep > 1, case.rollout.experts is not None
        kinds.add((case.train.ep > 1, case.train.etp > 1, *whole))
    assert len(kinds) >= 9, kinds


def check_plan(case: Case, seed: int) -> None:
    sources, targets = case.sources(), case.targets()
    check_coverage(sources, hf_shapes(case.family, case.shape))
    hf = case.weights()
    trained = [case.trained(hf, rank) for rank in range(case.world)]
    wanted = [case.generating(hf, rank) for rank in range(case.world)]
    for rank in range(case.world):
        shapes = {name: array.shape for name, array in trained[rank].items()}
        assert shapes == sources[rank].shapes, (seed, rank)
    plan = plan_reshard(sources, targets, itemsize=4)
    prove(plan, sources, targets)
    results = run_plan(plan, trained, targets)
    for rank in range(case.world):
        assert results[rank].keys() == wanted[rank].keys(), (seed, rank)
        for name, array in wanted[rank].items():
            assert np.array_equal(results[rank][name], array), (seed, rank, name)
        minimum = 4 * minimum_receive_elements(hf, trained[rank], wanted[rank])
        assert plan.receive_bytes[rank] <= minimum, (seed, rank)
        total = sum(volume(region.local_box) for region in targets[rank].regions)
        assert plan.local_bytes[rank] + plan.receive_bytes[rank] == 4 * total
    assert sum(plan.send_bytes) == sum(plan.receive_bytes)
    _check_balance(plan.send_bytes, sources, seed)


def _check_balance(send_bytes: tuple[int, ...], sources: list[RankLayout], seed: int) -> None:
    """Ranks that hold the same slices send the same, but for one slice."""
    alike: dict[tuple[Region, ...], list[int]] = {}
    for rank, layout in enumerate(sources):
        alike.setdefault(layout.regions, []).append(rank)
    for regions, ranks in alike.items():
        loads = [send_bytes[rank] for rank in ranks]
        largest = 4 * max((volume(region.local_box) for region in regions), default=0)
        assert max(loads) - min(loads) <= largest, (seed, ranks, loads)


@pytest.mark.parametrize(
    ("train", "rollout_tp"),
    [
        (TrainLayout(8, tp=4, pp=2), 1),
        (TrainLayout(8, tp=8), 1),
        (TrainLayout(8, tp=8), 4),
        (TrainLayout(8, tp=2, pp=2), 4),
        (TrainLayout(8, tp=2, pp=2, vpp=7, order="pp-tp-cp-ep-dp"), 2),
        (TrainLayout(8, pp=4, cp=2), 2),
    ],
)
def test_plan_of_a_7b_model_takes_under_a_second(train: TrainLayout, rollout_tp: int) -> None:
    family = resolve_family("qwen2", {})
    shape = QWEN25_7B
    if train.tp == 8:  # 28 heads cannot be cut in 8; 32 heads and as many slices otherwise
        shape = ModelShape(**{**shape.__dict__, "num_heads": 32})
    sources = [megatron_layout(family, shape, train, rank) for rank in range(8)]
    parts = [fused_layout(family, shape, rollout_tp, tp_rank) for tp_rank in range(rollout_tp)]
    targets = [parts[tp_rank] for _, tp_rank in assign(sources, parts).layout.assignment]
    assert is_within(1.0, lambda: plan_reshard(sources, targets, itemsize=2).hash())
    prove(plan_reshard(sources, targets, itemsize=2), sources, targets)


def test_engines_divide_attention_sinks_among_their_ranks() -> None:
    models = Path(__file__).parents[2] / "examples" / "recipes" / "models"
    config = json.loads((models / "gpt-oss-20b" / "config.json").read_text())
    family, shape = read_model(None, config)
    layout = fused_layout(family, shape, 2, 1)
    (name,) = {name for name in layout.shapes if name.endswith("layers.0.self_attn.sinks")}
    assert layout.shapes[name] == (shape.num_heads // 2,)


def test_plan_is_the_same_when_made_again() -> None:
    case = random_case(5, world=8)
    plan = plan_reshard(case.sources(), case.targets(), itemsize=2)
    again = plan_reshard(case.sources(), case.targets(), itemsize=2)
    assert again == plan
    assert again.hash() == plan.hash()
    other = plan_reshard(case.sources(), case.targets(), itemsize=4)
    assert other.hash() != plan.hash()


def test_plan_copies_whole_tensors_where_layouts_agree() -> None:
    family = resolve_family("qwen3", {})
    shape = ModelShape(2, 16, 4, 2, 4, 32, 128, qk_norm=True)
    source = [megatron_layout(family, shape, TrainLayout(1), 0)]
    target = [fused_layout(family, shape, 1, 0)]
    plan = plan_reshard(source, target, itemsize=2)
    fc1 = [op for op in plan.ops[0] if op.dest.endswith("gate_up_proj.weight")]
    assert [op.dest_box for op in fc1] == [((0, 64), (0, 16))] * 2
    assert plan.receive_bytes == plan.send_bytes == plan.messages == (0,)


def test_plan_shares_sending_among_data_parallel_owners() -> None:
    family = resolve_family("llama", {})
    shape = ModelShape(8, 16, 4, 2, 4, 32, 128)
    train = TrainLayout(8, pp=2)  # every layer is held by 4 ranks and needed by 4 others
    sources = [megatron_layout(family, shape, train, rank) for rank in range(8)]
    plan = plan_reshard(sources, [hf_layout(hf_shapes(family, shape))] * 8, itemsize=2)
    assert plan.messages == (1,) * 8  # each of them serves one, so messages are few
    first_stage = plan.send_bytes[:4]
    assert max(first_stage) - min(first_stage) <= 2 * 128 * 16


def test_plan_moves_no_expert_that_lies_on_the_same_rank_in_the_engine() -> None:
    shape = ModelShape(2, 16, 4, 4, 4, 32, 128, moe=MoeShape(8, 2, 24))
    family = resolve_family("qwen3_moe", {})
    sources = [megatron_layout(family, shape, TrainLayout(4, ep=4), rank) for rank in range(4)]
    plan = plan_reshard(sources, fused_layouts(family, shape, 4, ep=4), itemsize=2)
    assert plan.receive_bytes == (0,) * 4
    experts = 2 * 2 * 3 * 24 * 16 * 2  # layers, experts of a rank, matrices, width, hidden size
    cut = plan_reshard(sources, fused_layouts(family, shape, 4), itemsize=2)
    assert cut.receive_bytes == (experts * 3 // 4,) * 4


def test_plan_names_what_no_rank_holds() -> None:
    held = Region("w", ((0, 4), (0, 8)), "a", ((0, 4), (0, 8)))
    source = RankLayout((held,), {"a": (4, 8)})
    with pytest.raises(PlanError, match=r"w\[4:6, 0:8\] is needed, but no rank holds it"):
        plan_reshard([source], [hf_layout({"w": (6, 8)})], itemsize=2)
    with pytest.raises(PlanError, match=r"bias\[0:3\] is needed"):
        plan_reshard([source], [hf_layout({"bias": (3,)})], itemsize=2)
    with pytest.raises(PlanError, match="1 source layouts, but 2 target layouts"):
        plan_reshard([source], [RankLayout((), {})] * 2, itemsize=2)


def test_plan_joins_sources_that_overlap_in_part() -> None:
    """Rows 0-5 on one rank and 3-8 on the other: the third rank gets each row once."""

    def rows(start: int, stop: int) -> RankLayout:
        region = Region("w", ((start, stop), (0, 2)), "part", ((0, stop - start), (0, 2)))
        return RankLayout((region,), {"part": (stop - start, 2)})

    sources = [rows(0, 5), rows(3, 8), RankLayout((), {})]
    targets = [RankLayout((), {}), RankLayout((), {}), hf_layout({"w": (8, 2)})]
    plan = plan_reshard(sources, targets, itemsize=1)
    prove(plan, sources, targets)
    full = np.arange(16, dtype=np.float32).reshape(8, 2)
    arrays = [{"part": full[:5]}, {"part": full[3:]}, {}]
    assert np.array_equal(run_plan(plan, arrays, targets)[2]["w"], full)
    assert plan.receive_bytes == (0, 0, 16)
