"""`hybridrl check --cluster` over nodes of their own, with real defects planted in them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run, start
from network_nodes import CAN_MAKE, Nodes, network_nodes

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(not CAN_MAKE, reason="needs root and iproute2 for network namespaces"),
]
SMI = """#!/bin/sh
case "$1" in
  -L) echo "GPU 0: NVIDIA H100 80GB HBM3" ;;
  *driver_version*) echo "550.54.15, 0, NVIDIA H100 80GB HBM3, 81559, 40960, 3" ;;
  *) echo "0, GPU-1, NVIDIA H100 80GB HBM3, 81559, 500" ;;
esac
"""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with network_nodes(("node-a", "node-b", "node-c"), tmp_path / "nodes") as made:
        yield made


def check(nodes: Nodes, folder: Path) -> dict[tuple[str, str], str]:
    """Returns the remedy of each finding, by kind and place."""
    where = ("--hostfile", nodes.hostfile, "--ssh", nodes.ssh, "--run-dir", folder)
    process = start(["check", "--cluster", *where, "--json"])
    output, _ = process.communicate(timeout=240)
    found = json.loads(output.strip().splitlines()[-1])
    assert process.returncode == (0 if found["ok"] else 1), output
    assert found["ok"] == (not found["findings"])
    told = {(one["kind"], one["where"]): one["remedy"] for one in found["findings"]}
    print(json.dumps(found, indent=1))
    # The room of this machine's own disk is not planted.
    return {
        key: remedy for key, remedy in told.items() if key[0] != "disk-full" or "/dev/shm" in remedy
    }


def old_package(nodes: Nodes, node: str, name: str, version: str) -> None:
    """Puts metadata of an old version before the installed ones."""
    folder = nodes.home / node / "path" / f"{name}-{version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_defects_of_software_limits_clock_and_link_are_found(nodes: Nodes, tmp_path: Path) -> None:
    old_package(nodes, "node-b", "transformers", "4.40.0")
    clock = nodes.home / "node-b" / "path" / "sitecustomize.py"
    clock.write_text("import time\nreal = time.time\ntime.time = lambda: real() + 40\n")
    nodes.spoil("node-b", "ulimit -n 1024")
    nodes.spoil("node-b", "mount -t tmpfs -o size=8m none /dev/shm")
    tbf = ("tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms")
    nodes.run("node-c", "tc", "qdisc", "add", "dev", "eth0", "root", *tbf)
    found = check(nodes, tmp_path / "runs")
    kinds = {key[0]: remedy for key, remedy in found.items()}
    assert found.keys() == {
        ("package", "node-b"),
        ("differs", "node-b"),
        ("clock", "node-b"),
        ("files-limit", "node-b"),
        ("disk-full", "node-b"),
        ("pair-slow", "node-a - node-c"),
        ("pair-slow", "node-b - node-c"),
    }
    assert "pip install 'transformers" in kinds["package"] and "ulimit -n" in kinds["files-limit"]
    assert "chronyc" in kinds["clock"] and "remount,size=16G /dev/shm" in kinds["disk-full"]
    assert "tc qdisc show" in kinds["pair-slow"]
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.full
def test_healthy_nodes_have_no_findings(nodes: Nodes, tmp_path: Path) -> None:
    assert check(nodes, tmp_path / "runs") == {}


@pytest.mark.full
def test_defects_of_gpus_names_and_files_are_found(nodes: Nodes, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    smi = nodes.home / "node-b" / "bin" / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    hosts = "127.0.0.1 localhost\n127.0.1.1 node-c\n10.77.0.1 node-a\n"
    (nodes.home / "node-c" / "hosts").write_text(hosts)
    nodes.spoil("node-c", f"mount -t tmpfs -o size=30g none {runs}")
    found = check(nodes, runs)
    kinds = {key[0] for key in found}
    assert kinds == {
        *("gpus-unusable", "differs", "gpu-memory", "gpu-ecc"),
        *("name-unknown", "name-elsewhere", "shared-missing"),
    }
    assert "add node-b to /etc/hosts of node-c" in found["name-unknown", "node-c"]
    assert "GLOO_SOCKET_IFNAME=eth0" in found["name-elsewhere", "node-c"]
    assert f"findmnt -T {runs} on node-c" in found["shared-missing", "node-c"]
    assert "--gpu-reset -i 0" in found["gpu-ecc", "node-b gpu 0"]


@pytest.mark.full
def test_nodes_and_pairs_that_cannot_be_reached_are_named(nodes: Nodes, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    nodes.run("node-a", "ip", "route", "add", "blackhole", "10.77.0.2/32")
    nodes.spoil("node-c", f"mount --bind {runs} {runs}; mount -o remount,ro,bind {runs}")
    with nodes.hostfile.open("a") as file:
        file.write("nowhere slots=1\n")
    found = check(nodes, runs)
    assert {key for key in found if key[0] != "name-unknown"} == {
        ("node-unreachable", "nowhere"),
        ("pair-fails", "node-a - node-b"),
        ("shared-unwritable", "node-c"),
    }
    assert found["node-unreachable", "nowhere"] == f"{nodes.ssh} nowhere true"
    assert "between node-a and node-b" in found["pair-fails", "node-a - node-b"]
    assert f"touch {runs}/x on node-c" in found["shared-unwritable", "node-c"]


def test_what_means_nothing_without_cluster_is_refused(tmp_path: Path) -> None:
    assert "--hostfile" in run("check", "--hostfile", tmp_path, expect=2)
    assert "--slurm" in run("check", "--cluster", "--slurm", expect=2)
