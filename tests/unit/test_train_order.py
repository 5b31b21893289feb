"""`train.order`: what Megatron takes, where ranks then stand, and what 'auto' chooses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridrl.config.load import load_config_dict
from hybridrl.config.placement import Machines
from hybridrl.config.rules import ORDER_AXES, check, is_megatron_order
from hybridrl.config.rules_placement import placed
from hybridrl.config.schema import TrainConfig
from hybridrl.hybrid_engine.planning.assign import OrderChoice, assign, choose_order
from hybridrl.hybrid_engine.planning.order import order_layout
from hybridrl.hybrid_engine.planning.owned import equal_shares
from hybridrl.loop.setup import training_layout
from hybridrl.models.family import ModelShape, resolve_family
from hybridrl.models.megatron.dispatch import gathers
from hybridrl.models.weights import RankLayout, fused_layout, megatron_layouts
from hybridrl.parallel.layout import DEFAULT_ORDER, Coordinates, ExpertCoordinates, TrainLayout
from hybridrl.services.planner.hardware import ClusterFile
from hybridrl.services.planner.plan_report import plan_report

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "run": {"name": "a"},
    "model": {"init": str(ROOT / "benchmarks" / "models" / "qwen2.5-7b.json")},
    "algorithm": {"name": "grpo"},
    "steps": {"samples_per_prompt": 2},
}
QWEN2 = resolve_family("qwen2", {})
QWEN25_7B = ModelShape(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True)
LLAMA3_8B = ModelShape(32, 4096, 32, 8, 128, 14336, 128256)
ORDERS = ["-".join(axes) for axes in permutations(ORDER_AXES)]
# tp, pp, cp, ep; what is left of eight ranks is data parallel.
SIZES = [
    (2, 2, 1, 1),
    (2, 1, 2, 1),
    (1, 2, 2, 1),
    (1, 2, 2, 2),
    (2, 2, 1, 2),
    (2, 2, 2, 1),
    (1, 4, 1, 2),
]


@pytest.fixture
def one_rank_of_eight() -> Iterator[None]:
    """A job of which only rank 5 exists; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.usefixtures("one_rank_of_eight")
def test_orders_are_taken_if_and_only_if_megatron_takes_them(
    sizes: tuple[int, int, int, int],
) -> None:
    tp, pp, cp, ep = sizes
    taken = set()
    for order in ORDERS:
        parallel_state.destroy_model_parallel()
        try:
            parallel_state.initialize_model_parallel(
                tp,
                pp,
                context_parallel_size=cp,
                expert_model_parallel_size=ep,
                order=order,
                create_gloo_process_groups=False,
            )
        except AssertionError:
            continue
        taken.add(order)
        found = Coordinates(
            tp=parallel_state.get_tensor_model_parallel_rank(),
            cp=parallel_state.get_context_parallel_rank(),
            dp=parallel_state.get_data_parallel_rank(),
            pp=parallel_state.get_pipeline_model_parallel_rank(),
        )
        assert TrainLayout(8, tp, pp, cp, ep, order=order).coordinates(5) == found, order
    assert taken == {order for order in ORDERS if is_megatron_order(order, pp, cp, ep)}
    assert DEFAULT_ORDER in taken


# tp, pp, cp, ep, etp, of eight ranks.
EXPERT_SIZES = [(2, 1, 1, 2, 1), (2, 2, 1, 2, 2), (1, 2, 2, 2, 1), (4, 1, 1, 2, 2), (1, 1, 1, 4, 2)]


@pytest.mark.parametrize("sizes", EXPERT_SIZES)
@pytest.mark.usefixtures("one_rank_of_eight")
def test_experts_lie_where_megatron_puts_them(sizes: tuple[int, int, int, int, int]) -> None:
    tp, pp, cp, ep, etp = sizes
    found, gathering = set(), set()
    for order in ORDERS:
        if pp > 1 and not order.endswith("pp"):
            continue
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(
            tp,
            pp,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            order=order,
            create_gloo_process_groups=False,
        )
        at = ExpertCoordinates(
            etp=parallel_state.get_expert_tensor_parallel_rank(),
            ep=parallel_state.get_expert_model_parallel_rank(),
            edp=parallel_state.get_expert_data_parallel_rank(),
            pp=parallel_state.get_pipeline_model_parallel_rank(),
        )
        layout = TrainLayout(8, tp, pp, cp, ep, order=order, etp=etp)
        assert layout.expert_coordinates(5) == at, order
        assert layout.edp == parallel_state.get_expert_data_parallel_world_size()
        found.add(at)
        groups = get_default_pg_collection()
        for experts_per_token in (1, 2):
            is_gathered = layout.gathers_tokens(experts_per_token, 5)
            assert gathers(groups, experts_per_token) is is_gathered, order
            gathering.add(is_gathered)
    assert len(found) > 1
    assert gathering == ({True, False} if tp >= ep * etp else {False})


@pytest.mark.parametrize(
    "order", ["tp-pp", "tp-cp-ep-dp-dp", "TP-cp-ep-dp-pp", "", "dp-tp-cp-pp-ep-ep"]
)
def test_an_order_that_does_not_name_each_axis_once_is_refused(order: str) -> None:
    config = load_config_dict({**CONFIG, "train": {"order": order}})
    (found,) = check(config, 8)
    assert (found.name, found.value) == ("train.order", repr(order))
    assert "auto, or each of tp, cp, ep, dp, pp once" in str(found)
    assert "train.order=auto" in found.remedy and DEFAULT_ORDER in found.remedy


# Layouts of 4 to 16 ranks on nodes of 4 or 8: (ranks, node, tp, pp, cp, rollout.tp).
LAYOUTS = [
    (4, 4, 2, 2, 1, 4),
    (4, 4, 2, 1, 1, 4),
    (4, 4, 4, 1, 1, 2),
    (4, 4, 2, 2, 1, 2),
    (4, 4, 1, 4, 1, 4),
    (4, 4, 1, 2, 2, 4),
    (8, 8, 2, 2, 1, 4),
    (8, 8, 4, 2, 1, 2),
    (8, 8, 2, 2, 2, 4),
    (8, 8, 2, 1, 2, 4),
    (8, 4, 2, 2, 1, 4),
    (8, 4, 2, 2, 2, 4),
    (16, 8, 2, 2, 2, 4),
    (16, 8, 4, 2, 1, 4),
]


def sources_and_parts(
    train: TrainLayout, tp: int, shape: ModelShape = QWEN25_7B
) -> tuple[list[RankLayout], list[RankLayout]]:
    parts = [fused_layout(QWEN2, shape, tp, tp_rank) for tp_rank in range(tp)]
    return megatron_layouts(QWEN2, shape, train), parts


def num_nodes(layout: TrainLayout, axis: str, node: int) -> list[int]:
    return [len({rank // node for rank in group}) for group in layout.groups(axis)]


def lies_on_nodes(layout: TrainLayout, axis: str, node: int) -> bool:
    return max(num_nodes(layout, axis, node)) == 1


@pytest.mark.parametrize(("world", "node", "tp", "pp", "cp", "rollout_tp"), LAYOUTS)
def test_auto_receives_the_minimum_of_all_orders_that_keep_tensor_parallel_groups_on_a_node(
    world: int, node: int, tp: int, pp: int, cp: int, rollout_tp: int
) -> None:
    shape, received = replace(QWEN25_7B, num_layers=4), {}
    for axes in permutations(("tp", "cp-ep", "dp", "pp")):
        train = TrainLayout(world, tp, pp, cp, order="-".join(axes))
        if is_megatron_order(train.order, pp, cp, 1) and lies_on_nodes(train, "tp", node):
            placed = sources_and_parts(train, rollout_tp, shape)
            received[train.order] = assign(*placed, node).receive
    config = TrainConfig(tp=tp, pp=pp, cp=cp)
    found = order_layout(config, QWEN2, shape, world, rollout_tp, node)
    order = found.layout.order
    assert received[order] == min(received.values())
    assert found.choice == OrderChoice(order, received[order], received[DEFAULT_ORDER])
    assert order == DEFAULT_ORDER or received[order] < received[DEFAULT_ORDER]
    assert found.sources == sources_and_parts(found.layout, rollout_tp, shape)[0] == found.whole


@pytest.mark.parametrize(
    ("world", "node", "tp", "pp", "cp", "rollout_tp"),
    [
        (16, 8, 2, 1, 2, 8),  # without context parallel groups on a node nothing were received
        (16, 8, 2, 4, 1, 8),  # without data parallel ones a fifth less
        (16, 4, 2, 2, 1, 4),
        (32, 8, 2, 2, 2, 8),
        (32, 8, 8, 2, 1, 16),
        (12, 6, 4, 1, 1, 2),  # one group in three is on two nodes in any order
    ],
)
def test_auto_takes_no_group_off_its_node(
    world: int, node: int, tp: int, pp: int, cp: int, rollout_tp: int
) -> None:
    own = TrainLayout(world, tp, pp, cp)
    found = choose_order(own, *sources_and_parts(own, rollout_tp, LLAMA3_8B), node)
    chosen = TrainLayout(world, tp, pp, cp, order=found.order)
    for axis in ("tp", "cp"):
        assert sum(num_nodes(chosen, axis, node)) <= sum(num_nodes(own, axis, node))
    assert lies_on_nodes(chosen, "dp", node) or not lies_on_nodes(own, "dp", node)
    assert found.receive <= found.default_receive


def test_an_order_that_is_set_is_used_and_judged() -> None:
    config = TrainConfig(tp=2, pp=2, order="dp-tp-cp-ep-pp")
    found = order_layout(config, QWEN2, QWEN25_7B, 4, 4, 4)
    assert found.layout == TrainLayout(4, 2, 2, order="dp-tp-cp-ep-pp")
    assert found.choice is not None and found.choice.order != config.order
    assert found.sources == sources_and_parts(found.layout, 4)[0]


def test_optimizer_shares_are_what_an_order_is_chosen_for() -> None:
    config = TrainConfig(tp=2, fuse_param_gather=True)
    found = order_layout(config, QWEN2, QWEN25_7B, 4, 4, 4)
    own = TrainLayout(4, 2)
    sources, parts = sources_and_parts(own, 4)
    assert found.choice == choose_order(own, equal_shares(own, sources), parts, 4)
    assert found.sources == equal_shares(found.layout, found.whole)


@pytest.mark.parametrize(
    ("order", "rollout_tp", "node", "is_own"),
    [
        ("pp-tp-cp-ep-dp", 1, 8, False),
        ("auto", 1, 8, True),
        ("auto", 4, 8, False),
        ("auto", 4, 4, False),
        ("auto", 4, 2, True),
    ],
)
@pytest.mark.usefixtures("one_rank_of_eight")
def test_the_world_is_laid_out_as_plan_says(
    monkeypatch: pytest.MonkeyPatch, order: str, rollout_tp: int, node: int, is_own: bool
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(node))
    train = {"tp": 2, "pp": 2, "order": order}
    sections = {"train": train, "rollout": {"engine": "vllm", "tp": rollout_tp}}
    config = load_config_dict({**CONFIG, **sections})
    made = training_layout(config, placed(config, Machines(8))[0])
    report, _ = plan_report(config, 8, ClusterFile(gpus_per_node=node))
    assert made == TrainLayout(8, tp=2, pp=2, order=report["order"]["axes"])
    assert (made.order == DEFAULT_ORDER) is is_own
