"""Predictions for clusters: by hand, by the values in arrays, and for a large model."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clock import is_within
from some_cases import some
from weight_cases import PADDING, random_case

from hybridrl.config.load import load_config_dict
from hybridrl.errors import ConfigError
from hybridrl.hybrid_engine.planning.assign import assign
from hybridrl.hybrid_engine.planning.nodes import Cluster, planned_ms, predict
from hybridrl.hybrid_engine.planning.pieces import join
from hybridrl.hybrid_engine.planning.plan import plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.models.family import read_model
from hybridrl.models.weights import (
    RankLayout,
    fused_layouts,
    hf_layout,
    hf_shapes,
    megatron_layouts,
)
from hybridrl.parallel.host_gpus import Host, LocalGpu
from hybridrl.parallel.layout import TrainLayout
from hybridrl.services.planner.hardware import GIB, ClusterFile, load_cluster
from hybridrl.services.planner.plan_report import plan_report
from hybridrl.services.planner.plan_text import plan_text

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
@pytest.mark.parametrize("seed", some(range(25), 8))
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


@pytest.mark.full
def test_235b_on_256_ranks_is_planned_in_seconds_and_near_its_bound() -> None:
    config = ROOT / "examples" / "recipes" / "models" / "qwen3-235b-a22b" / "config.json"
    family, shape = read_model(None, json.loads(config.read_text()))
    assert round(sum(map(prod, hf_shapes(family, shape).values())) / 1e9, 1) == 235.1
    sources = megatron_layouts(family, shape, TrainLayout(256, tp=4, pp=8, ep=8))
    parts = fused_layouts(family, shape, 8, 8)
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


MODEL = str(ROOT / "benchmarks" / "models" / "qwen2.5-7b.json")
CONFIG: dict[str, Any] = {
    "run": {"name": "a"},
    "model": {"init": MODEL},
    "algorithm": {"name": "grpo"},
    "steps": {"samples_per_prompt": 2},
    "train": {"tp": 4, "pp": 2},
    "rollout": {"engine": "vllm", "tp": 2},
}
# A cluster file that says what is assumed without one.
ASSUMED = {
    "nodes": 8,
    "gpus_per_node": 8,
    "gpu_memory_gib": 81_079 / 1024,
    "matrix_tflops": 670,
    "memory_gb_per_s": 2850,
    "link_gb_per_s": 345,
    "host_gb_per_s": 46,
    "nic_gb_per_s": 45,
    "nics_per_node": 8,
    "latency_us": 10,
}


def cluster_file(folder: Path, keys: dict[str, float]) -> ClusterFile:
    (folder / "cluster.json").write_text(json.dumps(keys))
    return load_cluster(folder / "cluster.json")


def test_plan_reports_its_nodes_with_a_cluster_file_and_without(tmp_path: Path) -> None:
    config = load_config_dict(CONFIG)
    given = cluster_file(tmp_path, {**KEYS, "gpus_per_node": 8})
    for told in (given, None):
        report, violations = plan_report(config, 16, told)
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
        assert report["reshard"]["predicted_ms"] == report["cluster"]["planned_ms"]
    report, violations = plan_report(config, 8, given)
    assert [(v.name, v.value) for v in violations] == [("nodes * gpus_per_node", "2 * 8")]
    assert report.keys() == plan_report(config, 8)[0].keys() and report["fits"] is None


def test_a_plan_for_many_ranks_is_that_for_the_cluster_that_it_assumes(tmp_path: Path) -> None:
    """The same bytes, times and verdict, whether the cluster is given or not."""
    model = {"init": str(ROOT / "benchmarks" / "models" / "qwen2.5-32b.json")}
    train, rollout = {"tp": 8, "pp": 4}, {"engine": "vllm", "tp": 8}
    config = load_config_dict({**CONFIG, "model": model, "train": train, "rollout": rollout})
    without, _ = plan_report(config, 64)
    assert {key: found["value"] for key, found in without["assumptions"].items()} == ASSUMED
    for keys in ASSUMED, {"nodes": 8}, {"gpus_per_node": 8}, {}:
        report, violations = plan_report(config, 64, cluster_file(tmp_path, keys))
        assert violations == []
        for key, found in report["assumptions"].items():
            source = found.pop("source")
            assert (source == "--cluster") == (key in keys)
            assert found == {"value": ASSUMED[key]}
        same = without.keys() - {"assumptions", "verdict"}
        assert all(report[key] == without[key] for key in same)
        assert report["verdict"]["needed_bytes"] == without["verdict"]["needed_bytes"]
    # Bytes that cross on cards of 45 GB/s take far longer than on links of 345.
    receive = max(without["reshard"]["receive_bytes"])
    assert without["reshard"]["predicted_ms"] > 0.8 * 1e3 * receive / 45e9
    slow, _ = plan_report(config, 64, cluster_file(tmp_path, {"nic_gb_per_s": 9}))
    assert slow["reshard"]["predicted_ms"] > 4 * without["reshard"]["predicted_ms"]


@pytest.mark.parametrize(
    ("world", "keys", "host", "nodes", "gpus"),
    [
        (1, {}, Host(), 1, 1),
        (8, {}, Host(), 1, 8),
        (12, {}, Host(), 2, 6),
        (16, {}, Host(), 2, 8),
        (16, {}, Host(16, LocalGpu("V100", 32 * GIB)), 1, 16),
        (16, {"gpus_per_node": 4}, Host(), 4, 4),
        (2, {"gpus_per_node": 8}, Host(), 1, 2),
        (16, {"nodes": 8}, Host(), 8, 2),
    ],
)
def test_nodes_follow_from_the_ranks(
    world: int, keys: dict[str, int], host: Host, nodes: int, gpus: int
) -> None:
    config = load_config_dict({**CONFIG, "train": {}, "rollout": {"engine": "vllm"}})
    report, violations = plan_report(config, world, ClusterFile.model_validate(keys), host)
    assert violations == []
    found = report["assumptions"]
    assert [found[key]["value"] for key in ("nodes", "gpus_per_node")] == [nodes, gpus]
    assert found["nics_per_node"]["value"] == gpus


@pytest.mark.parametrize(("key", "size"), [("nodes", 3), ("gpus_per_node", 3)])
def test_nodes_that_the_ranks_do_not_fill_are_refused(key: str, size: int) -> None:
    config = load_config_dict(CONFIG)
    _, violations = plan_report(config, 8, ClusterFile.model_validate({key: size}))
    assert [(v.name, v.value) for v in violations] == [(key, size)]
    assert "a divisor of the world size 8" in str(violations[0])


def test_memory_is_that_of_the_cluster_file_then_of_the_host_then_of_an_h100() -> None:
    config = load_config_dict(CONFIG)
    host = Host(8, LocalGpu("NVIDIA H200", 140 * GIB))
    given = ClusterFile(gpu_memory_gib=80)
    found = [plan_report(config, 8, *told)[0] for told in ((given, host), (None, host), ())]
    assert [report["gpu_memory_bytes"] for report in found] == [
        80 * GIB,
        140 * GIB,
        81_079 * 2**20,
    ]
    sources = [report["assumptions"]["gpu_memory_gib"]["source"] for report in found]
    for source, word in zip(
        sources, ("--cluster", "NVIDIA H200 of this host", "H100"), strict=True
    ):
        assert word in source
    for report, source in zip(found, sources, strict=True):
        assert source in plan_text(report).splitlines()[0]


def test_a_slower_link_takes_longer_on_one_node_too() -> None:
    config = load_config_dict({**CONFIG, "train": {"tp": 4}})
    usual, _ = plan_report(config, 4)
    slow, _ = plan_report(config, 4, ClusterFile(link_gb_per_s=34.5))
    assert slow["reshard"]["predicted_ms"] == pytest.approx(
        10 * usual["reshard"]["predicted_ms"], rel=0.1
    )


def test_peer_transport_is_refused_across_nodes() -> None:
    rollout = {**CONFIG["rollout"], "transport": "peer"}
    config = load_config_dict({**CONFIG, "rollout": rollout})
    assert plan_report(config, 8)[1] == []
    _, violations = plan_report(config, 16)
    assert [(v.name, v.value) for v in violations] == [("rollout.transport", "peer")]
    assert plan_report(config, 16, ClusterFile(gpus_per_node=16))[1] == []


def test_plan_says_what_ascending_ranks_cost() -> None:
    sections = {
        "train": {"tp": 2, "order": "tp-cp-ep-dp-pp"},
        "rollout": {"engine": "vllm", "tp": 4},
    }
    config = load_config_dict({**CONFIG, **sections})
    report, _ = plan_report(config, 4)
    choices = report["rollout"]["choices"]
    assert choices["any_order"]["tp_ranks"] == [0, 2, 1, 3]
    assert choices["any_order"]["max_receive_bytes"] == 0
    assert choices["used"]["max_receive_bytes"] == max(report["reshard"]["receive_bytes"]) > 0
    assert "Set train.order=auto" in choices["remedy"]
    aligned, _ = plan_report(load_config_dict(CONFIG), 8)
    assert aligned["rollout"]["choices"]["remedy"] is None


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("nodes: 0", ["nodes: got 0", "greater than or equal to 1", "Number of nodes"]),
        ("nodess: 4", ["nodess: got 4", "nodes, gpus_per_node, gpu_memory_gib", "Remove it"]),
        ("gpu_memory_gib: much", ["gpu_memory_gib: got 'much'", "number", "2**30 bytes"]),
        ("gpus: {", ["YAML or JSON with the keys gpu, nodes"]),
        ("- 8", ["got [8]", "the keys gpu, nodes"]),
        (None, ["No such file", "YAML or JSON with the keys gpu, nodes", "Correct the path"]),
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


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("0x8xH200", ["nodes: got 0", "greater than or equal to 1"]),
        ("8x0xH200", ["gpus_per_node: got 0"]),
        ("8x8", ["8x8: got No such file", "such as 8x8xH200", "Correct the path"]),
    ],
)
def test_short_forms_of_clusters_with_faults_are_refused(text: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_cluster(Path(text))
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize("content", ["", "gpu_memory_gib: 80", "{}"])
def test_every_key_of_a_cluster_file_is_optional(tmp_path: Path, content: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(content)
    found = load_cluster(file)
    assert found.gpu_memory_gib == (80 if content[:3] == "gpu" else None)
    assert found.world_size() is None
    assert ClusterFile(nodes=4).world_size() == 32
    assert ClusterFile(nodes=4, gpus_per_node=2).world_size() == 8
