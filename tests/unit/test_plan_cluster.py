"""Predictions for clusters: by hand, by the values in arrays, and for large models on paper."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from clock import is_within
from weight_cases import PADDING, random_case

from hybridrl.cli.plan import load_cluster, plan_report
from hybridrl.config.load import load_config_dict
from hybridrl.errors import ConfigError
from hybridrl.hybrid_engine.assign import assign
from hybridrl.hybrid_engine.cluster import Cluster, planned_ms, predict
from hybridrl.hybrid_engine.pieces import join
from hybridrl.hybrid_engine.plan import plan_reshard
from hybridrl.hybrid_engine.proof import prove
from hybridrl.models.weights import RankLayout, hf_layout

ROOT = Path(__file__).parents[2]
NOTHING = RankLayout((), {})
KEYS = {
    "nodes": 2,
    "gpus_per_node": 2,
    "link_gb_per_s": 8.0,
    "nic_gb_per_s": 1.0,
    "nics_per_node": 2,
    "latency_us": 0.0,
}


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    path = ROOT / "benchmarks" / "paper_models.py"
    spec = importlib.util.spec_from_file_location("paper_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["paper_models"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_prediction_of_one_tensor_is_that_by_hand() -> None:
    """Rank 0 of 2 x 2 has 64 elements of 2 bytes that all need."""
    whole = hf_layout({"w": (8, 8)})
    joined = join([whole, NOTHING, NOTHING, NOTHING], [whole] * 4)
    found = predict(joined, 2, Cluster(**KEYS))
    assert (found.nic_receive_bytes, found.nic_send_bytes) == (128, 128)  # once, though two need it
    # Rank 0 gives rank 1 all of it, and half of it again for rank 1's NIC.
    assert found.link_bytes == 128 + 64
    assert found.bound_ms == pytest.approx(128 / 2e9 * 1e3)
    # NICs take 64 ns, links 24 ns, and they take turns: it is a single chunk.
    assert found.predicted_ms == pytest.approx((64 + 24) * 1e-6)
    late = predict(joined, 2, Cluster(**{**KEYS, "latency_us": 1.0}))
    # A message over the NIC, two over the links; the longer of both levels, then the other.
    assert late.predicted_ms == pytest.approx(found.predicted_ms + late.messages * 1e-3)
    assert late.messages == 3


def test_prediction_on_one_node_uses_no_network() -> None:
    whole = hf_layout({"w": (8, 8)})
    cluster = Cluster(**{**KEYS, "nodes": 1})
    found = predict(join([whole, NOTHING], [whole] * 2), 2, cluster)
    assert (found.nic_receive_bytes, found.link_bytes) == (0, 128)
    assert 0 < found.bound_ms <= found.predicted_ms


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("seed", range(25))
def test_pieces_cross_once_to_each_node_that_lacks_them(seed: int, gpus: int) -> None:
    """The bytes that nodes receive, counted by the values in their arrays."""
    case = random_case(seed, world=8)
    hf = case.weights()

    def values(rank: int, arrays: Any) -> set[float]:
        return {v for array in arrays(hf, rank).values() for v in np.unique(array)} - {PADDING}

    received = []
    for first in range(0, 8, gpus):
        node = range(first, first + gpus)
        has = set().union(*(values(rank, case.trained) for rank in node))
        received.append(len(set().union(*(values(rank, case.generating) for rank in node)) - has))
    cluster = Cluster(**{**KEYS, "nodes": 8 // gpus, "gpus_per_node": gpus})
    found = predict(join(case.sources(), case.targets()), 4, cluster)
    assert found.nic_receive_bytes == 4 * max(received)
    assert sum(received) * 4 <= found.nic_send_bytes * (8 // gpus)
    assert found.bound_ms <= found.predicted_ms
    plan = plan_reshard(case.sources(), case.targets(), 4, gpus)
    assert found.bound_ms <= planned_ms(plan.traffic, cluster) * 1.0001


def test_paper_models_have_their_parameters(paper: ModuleType) -> None:
    assert round(paper.qwen3_235b_a22b().num_parameters / 1e9, 1) == 235.1
    assert round(paper.deepseek_v3().num_parameters / 1e9, 1) == 671.0


def test_235b_on_256_ranks_is_planned_in_seconds_and_near_its_bound(paper: ModuleType) -> None:
    model = paper.qwen3_235b_a22b()
    sources = paper.train_layouts(model, 256, tp=4, pp=8, ep=8)
    parts = paper.engine_parts(model, 8, is_expert_parallel=True)
    made = []

    def make() -> None:
        best = assign(sources, parts, 8)
        targets = [parts[tp_rank] for _, tp_rank in best.layout.assignment]
        plan = plan_reshard(sources, targets, 2, 8)
        assert len(plan.hash()) == 64
        made[:] = best, targets, plan, plan.ops[255]

    assert is_within(10, make, tries=3)
    best, targets, plan, own = made
    assert max(plan.receive_bytes) == 2 * best.receive
    assert sum(plan.send_bytes) == sum(plan.receive_bytes)
    assert own[0].dest_rank == 255
    prove(plan, sources, targets, ranks=(0, 100, 255))
    cluster = Cluster(
        nodes=32,
        gpus_per_node=8,
        link_gb_per_s=345,
        nic_gb_per_s=45,
        nics_per_node=8,
        latency_us=10,
    )
    found = predict(join(sources, targets), 2, cluster)
    assert found.bound_ms <= found.predicted_ms <= 1.3 * found.bound_ms


CONFIG = {
    "run": {"name": "a"},
    "algorithm": {"name": "grpo"},
    "steps": {"samples_per_prompt": 2},
    "train": {"tp": 4, "pp": 2},
    "rollout": {"engine": "vllm", "tp": 2},
}


def test_plan_with_a_cluster_reports_its_nodes(tmp_path: Path) -> None:
    model = ROOT / "benchmarks" / "models" / "qwen2.5-7b.json"
    config = load_config_dict({**CONFIG, "model": {"init": str(model)}})
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({**KEYS, "gpus_per_node": 8}))
    report, violations = plan_report(config, 16, load_cluster(file))
    assert violations == []
    assert set(report["cluster"]) == {
        "nic_receive_bytes",
        "nic_send_bytes",
        "link_bytes",
        "messages",
        "predicted_ms",
        "bound_ms",
        "planned_ms",
    }
    report, violations = plan_report(config, 8, load_cluster(file))
    assert [(v.name, v.value) for v in violations] == [("nodes * gpus_per_node", "2 * 8")]


def test_plan_says_what_ascending_ranks_cost_and_the_remedy() -> None:
    model = ROOT / "benchmarks" / "models" / "qwen2.5-7b.json"
    sections = {"train": {"tp": 2}, "rollout": {"engine": "vllm", "tp": 4}}
    config = load_config_dict({**CONFIG, **sections, "model": {"init": str(model)}})
    report, _ = plan_report(config, 4)
    choices = report["rollout"]["choices"]
    assert choices["any_order"]["tp_ranks"] == [0, 2, 1, 3]
    assert choices["any_order"]["max_receive_bytes"] == 0
    assert choices["used"]["max_receive_bytes"] == max(report["reshard"]["receive_bytes"]) > 0
    assert "Set train.order=" in choices["remedy"]
    aligned, _ = plan_report(load_config_dict({**CONFIG, "model": {"init": str(model)}}), 8)
    assert aligned["rollout"]["choices"]["remedy"] is None


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("nodes: 0", ["nodes: got 0", "greater than or equal to 1", "Number of nodes"]),
        ("nodess: 4", ["nodess: got 4", "nodes, gpus_per_node", "Remove it"]),
        ("gpus: {", ["YAML or JSON of the keys nodes"]),
        (None, ["No such file", "YAML or JSON of the keys nodes"]),
    ],
)
def test_cluster_files_with_faults_are_refused(
    tmp_path: Path, content: str | None, parts: list[str]
) -> None:
    file = tmp_path / "cluster.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_cluster(file)
    assert all(part in str(caught.value) for part in parts), caught.value
