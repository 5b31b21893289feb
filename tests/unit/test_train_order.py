"""`train.order`: what Megatron takes, where ranks then stand, and the remedy that plan names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore

from hybridrl.cli.plan import plan_report
from hybridrl.config.load import load_config_dict
from hybridrl.config.rules import AXES, check, is_megatron_order
from hybridrl.config.schema import TrainConfig
from hybridrl.hybrid_engine.assign import assign, order_without_loss
from hybridrl.models.family import ModelShape, resolve_family
from hybridrl.models.weights import fused_layout, megatron_layout
from hybridrl.parallel.layout import DEFAULT_ORDER, Coordinates, TrainLayout
from hybridrl.trainer.setup import make_world

ROOT = Path(__file__).parents[2]
CONFIG: dict[str, Any] = {
    "run": {"name": "a"},
    "model": {"init": str(ROOT / "benchmarks" / "models" / "qwen2.5-7b.json")},
    "algorithm": {"name": "grpo"},
    "steps": {"samples_per_prompt": 2},
}
ORDERS = ["-".join(axes) for axes in permutations(AXES)]
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


@pytest.mark.parametrize(
    "order", ["tp-pp", "tp-cp-ep-dp-dp", "TP-cp-ep-dp-pp", "", "dp-tp-cp-pp-ep-ep"]
)
def test_an_order_that_does_not_name_each_axis_once_is_refused(order: str) -> None:
    config = load_config_dict({**CONFIG, "train": {"order": order}})
    (found,) = check(config, 8)
    assert (found.name, found.value) == ("train.order", repr(order))
    assert "tp, cp, ep, dp, pp once" in str(found)
    assert f"train.order={DEFAULT_ORDER}" in found.remedy


def test_an_order_that_megatron_does_not_take_is_refused() -> None:
    order = {"order": "pp-tp-cp-ep-dp"}
    assert check(load_config_dict({**CONFIG, "train": {"pp": 2, **order}}), 8) == []
    (found,) = check(load_config_dict({**CONFIG, "train": {"pp": 2, "cp": 2, **order}}), 8)
    assert found.name == "train.order" and "ends with pp" in str(found)
    assert "train.cp=2" in str(found) and found.remedy == "Put pp last."


def test_default_order_is_the_layouts() -> None:
    assert TrainConfig().order == DEFAULT_ORDER


@pytest.mark.parametrize("train", [{"tp": 2, "pp": 2}, {"tp": 2}])
def test_plan_with_the_order_that_it_names_costs_what_it_says(train: dict[str, Any]) -> None:
    sections = {**CONFIG, "rollout": {"engine": "vllm", "tp": 4}}
    report, _ = plan_report(load_config_dict({**sections, "train": train}), 4)
    choices = report["rollout"]["choices"]
    named = re.search(r"Set (train\.order=[a-z-]+):", choices["remedy"])
    assert named
    config = load_config_dict({**sections, "train": train}, [named[1]])
    again, violations = plan_report(config, 4)
    assert violations == [] and again["rollout"]["choices"]["remedy"] is None
    for way in ("receive", "send"):
        promised = choices["any_order"][f"max_{way}_bytes"]
        assert max(again["reshard"][f"{way}_bytes"]) <= promised
        assert promised < choices["used"][f"max_{way}_bytes"] or way == "send"


def test_an_order_that_megatron_does_not_take_is_not_named() -> None:
    """Of all orders only some that do not end with pp cost as little here."""
    family, shape = resolve_family("qwen2", {}), ModelShape(4, 64, 8, 8, 8, 96, 256)
    train = TrainLayout(8, tp=2, pp=2, cp=2)
    sources = [megatron_layout(family, shape, train, rank) for rank in range(8)]
    parts = [fused_layout(family, shape, 8, tp_rank) for tp_rank in range(8)]
    free = assign(sources, parts, is_ascending=False)
    assert free.cost < assign(sources, parts).cost
    assert order_without_loss(train, sources, parts, free) is None


@pytest.mark.usefixtures("one_rank_of_eight")
def test_the_world_is_laid_out_in_the_configured_order(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr("hybridrl.trainer.setup.World", lambda layout, *_: made.append(layout))
    order = "pp-tp-cp-ep-dp"
    make_world(load_config_dict({**CONFIG, "train": {"tp": 2, "pp": 2, "order": order}}), None)
    assert made == [TrainLayout(8, tp=2, pp=2, order=order)]
