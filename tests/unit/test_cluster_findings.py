"""What `check --cluster` finds in facts: each defect its finding and remedy, and nothing else."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hybridrl.services.cluster_check import probe
from hybridrl.services.cluster_check.findings import GIB, ClusterFacts, PairFacts, judge
from hybridrl.services.cluster_check.links import rounds
from hybridrl.services.cluster_check.probe import GpuFacts, NodeFacts


def gpu(index: int, **changed: Any) -> GpuFacts:
    values = {"name": "H100", "total_bytes": 80 * GIB, "ecc_errors": 0, "tflops": 700.0}
    return GpuFacts(**{"index": index, **values, **changed})


def node(name: str, **changed: Any) -> NodeFacts:
    """A healthy node with two GPUs."""
    values: dict[str, Any] = {
        "versions": {"python": "3.11.9", "numpy": "2.0", "GPUs": "2 x H100"},
        "num_gpus_on_bus": 2,
        "gpus": [gpu(0), gpu(1)],
        "num_torch_gpus": 2,
        "max_files": 1 << 20,
        "has_rdma": True,
        "free_bytes": {"run": ("/data/runs", 900 * GIB), "temporary": ("/tmp", 9 * GIB)},
        "address": f"10.0.0.{name[-1]}",
        "own_address": f"10.0.0.{name[-1]}",
        "interface": "eth7",
    }
    return NodeFacts(name, **{**values, **changed})


def cluster(nodes: dict[str, dict[str, Any]] | None = None, **changed: Any) -> ClusterFacts:
    """Four healthy nodes, some of which are changed."""
    names = ["n1", "n2", "n3", "n4"]
    values: dict[str, Any] = {
        "folder": "/d",
        "pairs": [PairFacts(a, b, "gloo", 1.6) for a in names for b in names if a < b],
        "all_reduce": [("gloo", 1.0, "")],
        "unseen": {name: [] for name in names},
    }
    found = [node(name, **(nodes or {}).get(name, {})) for name in names]
    return ClusterFacts(nodes=found, **{**values, **changed})


def versions(**changed: str) -> dict[str, Any]:
    return {"versions": {**node("n1").versions, **changed}}


def of_gpu(**changed: Any) -> dict[str, dict[str, Any]]:
    return {"n2": {"gpus": [gpu(0), gpu(1, **changed)]}}


# Each defect with the kind of finding, its place, and a part of the remedy.
DEFECTS: list[tuple[str, ClusterFacts, str, str]] = [
    ("node-unreachable", cluster(unreachable={"n5": "no route"}), "n5", "ssh n5 true"),
    ("package", cluster({"n2": {"problems": [("a", "b", "pip install a")]}}), "n2", "pip install"),
    ("differs", cluster({"n2": versions(numpy="2.2")}), "n2", "change numpy on n2 to 2.0"),
    ("gpus-unusable", cluster({"n2": {"num_torch_gpus": 1}}), "n2", "unset CUDA_VISIBLE_DEVICES"),
    ("gpus-unusable", cluster({"n2": {"num_gpus_on_bus": 8}}), "n2", "nvidia-driver"),
    ("gpu-memory", cluster(of_gpu(used_bytes=9 * GIB)), "n2 gpu 1", "--query-compute-apps"),
    ("gpu-ecc", cluster(of_gpu(ecc_errors=2)), "n2 gpu 1", "--gpu-reset -i 1"),
    ("gpu-fault", cluster(of_gpu(fault="Xid")), "n2 gpu 1", "grep -i xid"),
    ("gpu-slow", cluster(of_gpu(tflops=520.0)), "n2 gpu 1", "PERFORMANCE,CLOCK"),
    ("clock", cluster({"n2": {"clock_ahead_s": -40.0}}), "n2", "chronyc makestep"),
    (
        "name-unknown",
        cluster({"n2": {"unknown_names": ["n3"]}}),
        "n2",
        "add n3 to /etc/hosts of n2",
    ),
    ("name-elsewhere", cluster({"n2": {"own_address": "127.0.1.1"}}), "n2", "IFNAME=eth7"),
    ("files-limit", cluster({"n2": {"max_files": 1024}}), "n2", "ulimit -n 65536"),
    ("locked-memory", cluster({"n2": {"max_locked_bytes": 65536}}), "n2", "ulimit -l unlimited"),
    ("disk-full", cluster({"n2": {"free_bytes": {"run": ("/d", GIB)}}}), "n2", "move run.dir"),
    ("pair-fails", cluster({"n2": {"unconnected": {"n1": "refused"}}}), "n1 - n2", "n1 and n2"),
    (
        "pair-slow",
        cluster(pairs=[PairFacts("n1", "n2", "gloo", 0.3), PairFacts("n1", "n3", "gloo", 1.6)]),
        "n1 - n2",
        "ethtool eth7; iperf3 -c n2",
    ),
    ("all-reduce", cluster(all_reduce=[("gloo", 1.0, "off by 1")]), "all nodes", "IFNAME=eth7"),
    ("shared-missing", cluster(unseen={"n2": ["n1"]}), "n2", "findmnt -T /d on n2"),
    ("shared-unwritable", cluster({"n2": {"folder_fault": "Read-only"}}), "n2", "touch /d/x on n2"),
]


def test_a_healthy_cluster_has_no_findings() -> None:
    assert judge(cluster()) == []
    assert judge(ClusterFacts()) == []


@pytest.mark.parametrize(("kind", "facts", "where", "remedy"), DEFECTS)
def test_each_defect_is_found_where_it_is(
    kind: str, facts: ClusterFacts, where: str, remedy: str
) -> None:
    (found,) = judge(facts)
    assert (found.kind, found.where) == (kind, where)
    assert remedy in found.remedy and "{" not in found.remedy


def test_bounds_are_between_healthy_and_faulty() -> None:
    assert judge(cluster({"n2": {"gpus": [gpu(0, tflops=690.0), gpu(1, tflops=610.0)]}})) == []
    assert judge(cluster({"n2": {"clock_ahead_s": 1.9}})) == []
    # Limits of locked memory mean nothing without RDMA.
    assert judge(cluster({"n2": {"max_locked_bytes": 65536, "has_rdma": False}})) == []
    # A pair that fails from both sides is one, and a node that did not answer has its own finding.
    both = {"n1": {"unconnected": {"n2": "x", "n9": "x"}}, "n2": {"unconnected": {"n1": "x"}}}
    assert [one.kind for one in judge(cluster(both))] == ["pair-fails"]
    # Of two nodes the clock of the asking host decides.
    (found,) = judge(ClusterFacts(nodes=[node("n1"), node("n2", clock_ahead_s=5.0)]))
    assert (found.where, "5.0 s ahead" in found.found) == ("n2", True)


def test_facts_survive_json() -> None:
    facts = replace(node("n1"), problems=[["a", "b", "c"]])  # type: ignore[list-item]
    found = NodeFacts.from_json(json.loads(json.dumps(asdict(facts))))
    assert judge(ClusterFacts(nodes=[found])) == judge(ClusterFacts(nodes=[facts]))


@pytest.mark.parametrize("count", range(7))
def test_every_pair_has_one_round_and_no_node_two_pairs_at_once(count: int) -> None:
    found = rounds(count)
    pairs = [one for together in found for one in together]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for together in found:
        players = [player for one in together for player in one]
        assert len(players) == len(set(players))


def test_a_node_that_does_not_see_another_ones_file_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "SEEN_S", 0.2)
    probe._file(str(tmp_path), "t", "a").write_text("a")
    given = {"address": "", "port": 0, "interface": "", "has_gpus": False, "has_links": False}
    found = probe.meet(str(tmp_path), "t", ["a", "b"], 0, **given)
    assert found == {"unseen": ["b"], "all_reduce": [], "pairs": []}
    probe.clean(str(tmp_path), "t", "a")
    assert not list(tmp_path.iterdir())
