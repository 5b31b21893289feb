"""What `check --cluster` finds in facts: each defect its finding and remedy, and nothing else."""

from __future__ import annotations

import runpy
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from hybridrl.cli import cluster_probe
from hybridrl.cli.cluster_facts import (
    ClusterFacts,
    GpuFacts,
    NodeFacts,
    PairFacts,
    SharedFacts,
    SpaceFacts,
)
from hybridrl.cli.cluster_findings import GIB, KINDS, judge
from hybridrl.cli.cluster_links import rounds
from hybridrl.config.packages import REQUIRED

ROOT = Path(__file__).parents[2]
H100 = "NVIDIA H100 80GB HBM3"


def least(wanted: str) -> str:
    """A version within bounds."""
    return next(bound.version for bound in SpecifierSet(wanted) if bound.operator in (">=", "=="))


def gpu(index: int, **changed: Any) -> GpuFacts:
    values = {"total_bytes": 80 * GIB, "ecc_errors": 0, "tflops": 700.0, "copy_gb_per_s": 2700.0}
    return GpuFacts(**{"index": index, "name": H100, **values, **changed})


def node(name: str, **changed: Any) -> NodeFacts:
    """A healthy node with two GPUs."""
    values: dict[str, Any] = {
        "host": name,
        "python": "3.11.9",
        "hybridrl": "1",
        "packages": {package: least(wanted) for package, wanted in REQUIRED.items()},
        "driver": "580.65.06",
        "torch_cuda": "13.0",
        "has_gpu_hardware": True,
        "gpus": [gpu(0), gpu(1)],
        "num_torch_gpus": 2,
        "max_files": 1 << 20,
        "has_rdma": True,
        "free_memory_bytes": 500 * GIB,
        "spaces": [
            SpaceFacts("/data/runs", "run", 900 * GIB),
            SpaceFacts("/tmp", "temporary", 9 * GIB),
        ],
        "address": f"10.0.0.{name[-1]}",
        "own_address": f"10.0.0.{name[-1]}",
        "interface": "eth7",
        "link_gbit_per_s": 100.0,
        "cpu_gflops": 60.0,
        "clock_error_s": 0.01,
    }
    return NodeFacts(name, **{**values, **changed})


def pair(
    first: str, second: str, rate: float | None = 1.6, backend: str = "gloo", **more: Any
) -> PairFacts:
    return PairFacts(first, second, backend, rate, **more)


def cluster(nodes: dict[str, dict[str, Any]] | None = None, **changed: Any) -> ClusterFacts:
    """Four healthy nodes, some of which are changed."""
    names = ["n1", "n2", "n3", "n4"]
    values: dict[str, Any] = {
        "pairs": [pair(a, b) for a in names for b in names if a < b],
        "all_reduce": [("gloo", 1.0, "")],
        "shared": [SharedFacts(name, "/data/runs", 900.0, 900.0) for name in names],
    }
    return ClusterFacts(
        [node(n, **(nodes or {}).get(n, {})) for n in names], **{**values, **changed}
    )


def packages(**changed: str | None) -> dict[str, Any]:
    return {"packages": {**node("n1").packages, **changed}}


DEFECTS: list[tuple[str, ClusterFacts, str, str]] = [
    (
        "package",
        cluster({"n2": packages(transformers="4.40.0")}),
        "n2",
        "pip install 'transformers>=5",
    ),
    ("package", cluster({"n2": packages(xxhash=None)}), "n2", "pip install 'xxhash>="),
    ("package-differs", cluster({"n2": packages(numpy="2.2.0")}), "n2", "pip install 'numpy==2.0'"),
    ("python-differs", cluster({"n3": {"python": "3.12.1"}}), "n3", "install Python 3.11.9 on n3"),
    (
        "hybridrl-differs",
        cluster({"n3": {"hybridrl": "0"}}),
        "n3",
        "pip install 'hybridrl==1' on n3",
    ),
    (
        "driver-missing",
        cluster({"n4": {"driver": "", "gpus": []}}),
        "n4",
        "apt-get install nvidia-driver",
    ),
    (
        "driver-old",
        cluster({"n1": {"driver": "550.54.15"}}),
        "n1",
        "install NVIDIA driver 580.65.06 or",
    ),
    (
        "driver-differs",
        cluster({"n1": {"driver": "590.1"}}),
        "n1",
        "install NVIDIA driver 580.65.06 on n1",
    ),
    (
        "library-missing",
        cluster({"n1": {"missing_libraries": {"libcuda.so.1": "cannot open"}}}),
        "n1",
        "docker run --gpus all",
    ),
    ("gpus-unusable", cluster({"n2": {"num_torch_gpus": 1}}), "n2", "unset CUDA_VISIBLE_DEVICES"),
    ("gpus-differ", cluster({"n2": {"gpus": [gpu(0)]}}), "n2", "nvidia-smi -L"),
    (
        "gpu-memory",
        cluster({"n2": {"gpus": [gpu(0), gpu(1, used_bytes=9 * GIB)]}}),
        "n2 gpu 1",
        "--query-compute-apps",
    ),
    (
        "gpu-ecc",
        cluster({"n2": {"gpus": [gpu(0), gpu(1, ecc_errors=2)]}}),
        "n2 gpu 1",
        "--gpu-reset -i 1",
    ),
    (
        "gpu-fault",
        cluster({"n2": {"gpus": [gpu(0), gpu(1, fault="Xid")]}}),
        "n2 gpu 1",
        "grep -i xid",
    ),
    (
        "gpu-slow",
        cluster({"n2": {"gpus": [gpu(0), gpu(1, tflops=520.0)]}}),
        "n2 gpu 1",
        "PERFORMANCE,CLOCK",
    ),
    (
        "gpu-copy-slow",
        cluster({"n2": {"gpus": [gpu(0, copy_gb_per_s=1900.0), gpu(1)]}}),
        "n2 gpu 0",
        "ROW_REMAPPER -i 0",
    ),
    ("processor-slow", cluster({"n2": {"cpu_gflops": 25.0}}), "n2", "cpupower"),
    ("clock", cluster({"n2": {"clock_ahead_s": -40.0}}), "n2", "chronyc makestep"),
    (
        "name-unknown",
        cluster({"n2": {"unknown_names": ["n3"]}}),
        "n2",
        "add n3 to /etc/hosts of n2",
    ),
    (
        "name-elsewhere",
        cluster({"n2": {"own_address": "127.0.1.1"}}),
        "n2",
        "export GLOO_SOCKET_IFNAME=eth7",
    ),
    ("files-limit", cluster({"n2": {"max_files": 1024}}), "n2", "ulimit -n 65536"),
    ("locked-memory", cluster({"n2": {"max_locked_bytes": 65536}}), "n2", "ulimit -l unlimited"),
    ("memory", cluster({"n2": {"free_memory_bytes": GIB}}), "n2", "--sort=-rss"),
    (
        "disk-full",
        cluster({"n2": {"spaces": [SpaceFacts("/data", "run", GIB)]}}),
        "n2",
        "move run.dir",
    ),
    ("node-unreachable", cluster(unreachable={"n5": "no route"}), "n5", "ssh n5 true"),
    (
        "pair-fails",
        cluster(pairs=[pair("n1", "n2", None, "tcp", fault="refused")]),
        "n1 - n2",
        "between n1 and n2",
    ),
    (
        "pair-slow",
        cluster(pairs=[pair("n1", "n2", 0.3), pair("n1", "n3")]),
        "n1 - n2",
        "ethtool eth7; iperf3 -c n2",
    ),
    ("pair-slow", cluster(pairs=[pair("n1", "n2", 5.0, "nccl")]), "n1 - n2", "tc qdisc show"),
    (
        "pair-slow",
        cluster(pairs=[pair("n1 gpu 0", "n1 gpu 1", 50.0, "copy")]),
        "n1 gpu 0 - n1 gpu 1",
        "tc qdisc",
    ),
    (
        "all-reduce",
        cluster(all_reduce=[("gloo", 1.0, "the sum is off by 1")]),
        "all nodes",
        "IFNAME=eth7",
    ),
    (
        "shared-missing",
        cluster(shared=[SharedFacts("n2", "/d", 90, 90, unseen=["n1"])]),
        "n2",
        "findmnt -T /d on n2",
    ),
    (
        "shared-stale",
        cluster(shared=[SharedFacts("n2", "/d", 90, 90, differing=["n1"])]),
        "n2",
        "actimeo=1 /d on n2",
    ),
    ("shared-slow", cluster(shared=[SharedFacts("n2", "/d", 9, 90)]), "n2", "nfsstat"),
    (
        "shared-unwritable",
        cluster(shared=[SharedFacts("n2", "/d", fault="Read-only")]),
        "n2",
        "touch /d/x on n2",
    ),
]


def test_a_healthy_cluster_has_no_findings() -> None:
    assert judge(cluster()) == []
    assert judge(ClusterFacts([])) == []


@pytest.mark.parametrize(("kind", "facts", "where", "remedy"), DEFECTS)
def test_each_defect_is_found_where_it_is(
    kind: str, facts: ClusterFacts, where: str, remedy: str
) -> None:
    found = {one.kind: one for one in judge(facts)}
    assert kind in found and found[kind].where == where, found
    assert remedy in found[kind].remedy and "{" not in found[kind].remedy
    # What follows from the same defect may be said too, and nothing beyond that.
    follows = {"package": {"package-differs"}, "driver-old": {"driver-differs"}}
    follows["driver-missing"] = {"driver-differs", "gpus-differ"}
    assert found.keys() - {kind} <= follows.get(kind, set())


def test_every_kind_of_finding_has_a_defect() -> None:
    assert {kind for kind, *_ in DEFECTS} == KINDS.keys()


def test_bounds_lie_between_healthy_and_sick() -> None:
    healthy = [gpu(0, tflops=690.0), gpu(1, tflops=610.0)]
    assert judge(cluster({"n2": {"gpus": healthy}})) == []
    assert judge(cluster({"n2": {"clock_ahead_s": 0.9}})) == []
    # A clock that could not be read quickly is not blamed.
    assert judge(cluster({"n2": {"clock_ahead_s": 3.0, "clock_error_s": 2.5}})) == []
    # Limits of locked memory mean nothing without RDMA.
    assert judge(cluster({"n2": {"max_locked_bytes": 65536, "has_rdma": False}})) == []
    # A link of 1 Gbit/s that gives what it can is healthy.
    slow = {f"n{k}": {"link_gbit_per_s": 1.0} for k in range(1, 5)}
    assert judge(cluster(slow, pairs=[pair("n1", "n2", 0.11)])) == []
    # All GPUs alike and slow: the peak of the product says so.
    cold = {f"n{k}": {"gpus": [gpu(0, tflops=300.0), gpu(1, tflops=300.0)]} for k in range(1, 5)}
    assert {one.kind for one in judge(cluster(cold))} == {"gpu-slow"}


def test_of_two_nodes_the_clock_of_the_asking_host_decides() -> None:
    facts = ClusterFacts([node("n1"), node("n2", clock_ahead_s=5.0)])
    assert [(one.kind, one.where) for one in judge(facts)] == [("clock", "n2")]
    assert "5.0 s ahead" in judge(facts)[0].found


def test_facts_survive_json() -> None:
    facts = cluster()
    sent = facts.as_json()["nodes"][0]
    assert NodeFacts.from_json(sent) == facts.nodes[0]
    changed = replace(facts.nodes[0], problems=[("a", "b", "c")])
    assert NodeFacts.from_json(ClusterFacts([changed]).as_json()["nodes"][0]) == changed


@pytest.mark.parametrize("count", range(7))
def test_every_pair_has_one_round_and_no_node_two_pairs_at_once(count: int) -> None:
    found = rounds(count)
    pairs = [one for together in found for one in together]
    assert sorted(pairs) == [(a, b) for a in range(count) for b in range(a + 1, count)]
    for together in found:
        players = [player for one in together for player in one]
        assert len(players) == len(set(players))


def test_the_page_of_findings_is_as_made() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "scripts" / "cluster_check.py"))["page"]()
    assert (ROOT / "docs" / "reference" / "cluster_check.md").read_text() == made


def test_a_file_system_that_gives_old_bytes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node a has written anew, and b, whose folder is a copy, still has the older file."""
    monkeypatch.setattr(cluster_probe, "SEEN_S", 0.2)
    (tmp_path / "a").mkdir()
    first = cluster_probe.Probe("a", tmp_path / "a")
    assert first.write("t", 1)["fault"] == ""
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first.write("t", 2)
    second = cluster_probe.Probe("b", tmp_path / "b")
    assert second.read("t", 2, ["a"]) == {"unseen": [], "differing": ["a"]}
    assert second.read("t", 2, ["a", "c"])["unseen"] == ["c"]
    assert first.read("t", 2, ["a"]) == {"unseen": [], "differing": []}
    for probe in (first, second):
        probe.close()
    assert not list((tmp_path / "a").iterdir())


def test_a_library_that_does_not_open_is_named() -> None:
    found = cluster_probe.missing_libraries(["libc.so.6", "libnone.so.1"])
    assert found.keys() == {"libnone.so.1"} and "cannot open" in found["libnone.so.1"]
