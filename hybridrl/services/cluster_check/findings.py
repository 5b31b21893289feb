"""Judges what `hybridrl check --cluster` has measured: facts in, findings out.

A finding names the node or pair, what was found there, and a command or step that fixes it.
docs/reference/cluster_check.md is made from KINDS.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from hybridrl.services.cluster_check.probe import GpuFacts, NodeFacts

GIB = 2**30
MAX_CLOCK_S = 2.0  # file times of nodes order checkpoints and locks (stale after 90 s)
MIN_FILES = 16_384  # sockets of a rank to some thousand others, and files of data and caches
MIN_FREE_BYTES = {"run": 20 * GIB, "temporary": 2 * GIB, "cache": 10 * GIB, "shared memory": GIB}
MAX_USED_GPU_BYTES = GIB  # the context of a process that should not be there has about half of it
SLOW_GPU = 0.8  # of the median of equal GPUs: clocks of healthy ones differ by less than 10%
SLOW_PAIR = 0.5  # of the fastest pair


class Kind(NamedTuple):
    """A kind of finding.

    Args:
        looks_at: What is judged, with its bound.
        remedy: The command; braces are filled from the finding.
    """

    looks_at: str
    remedy: str


KINDS: dict[str, Kind] = {
    "node-unreachable": Kind("each node answers", "{ssh} {node} true"),
    "package": Kind("`hybridrl check` of each node has no problem", "{fix}"),
    "differs": Kind(
        "the same Python, packages, driver and GPUs on all nodes",
        "bring {name} on {node} to {common}, as on the others; or leave the node out",
    ),
    "gpus-unusable": Kind(
        "torch can use every GPU of the node",
        "nvidia-smi (no driver: apt-get install nvidia-driver-580-server, in containers docker run"
        " --gpus all); unset CUDA_VISIBLE_DEVICES; python -c 'import torch; torch.cuda.init()'",
    ),
    "gpu-memory": Kind(
        "at most 1 GiB of a GPU's memory taken",
        "nvidia-smi --query-compute-apps=pid,used_memory --format=csv; kill what is left over",
    ),
    "gpu-ecc": Kind(
        "no uncorrected memory error since the node started",
        "nvidia-smi --gpu-reset -i {index}; if errors return, replace the GPU",
    ),
    "gpu-fault": Kind(
        "matrix products on every GPU end, and are right",
        "dmesg | grep -i xid; nvidia-smi --gpu-reset -i {index}",
    ),
    "gpu-slow": Kind(
        "matrix products at 80% of the median of equal GPUs or faster",
        "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER -i {index}; look for throttling",
    ),
    "clock": Kind("clocks within 2 s of each other", "chronyc makestep, or: timedatectl set-ntp 1"),
    "name-unknown": Kind(
        "nodes resolve each other's names", "add {name} to /etc/hosts of {node}, or to DNS"
    ),
    "name-elsewhere": Kind(
        "a node's own name means the address of the interface to the others",
        "export GLOO_SOCKET_IFNAME={interface} NCCL_SOCKET_IFNAME={interface}",
    ),
    "files-limit": Kind(
        "16,384 open files", "ulimit -n 65536; for good in /etc/security/limits.conf"
    ),
    "locked-memory": Kind(
        "no limit of locked memory where there is RDMA",
        "ulimit -l unlimited; for good in /etc/security/limits.conf",
    ),
    "disk-full": Kind(
        "room: run folder 20 GiB, cache 10, temporary files 2, shared memory 1",
        "df -h {folder}; delete files there, or {move}",
    ),
    "pair-fails": Kind(
        "every pair of nodes connects",
        "open TCP ports between {first} and {second}: nft list ruleset",
    ),
    "pair-slow": Kind(
        "half of the rate of the fastest pair or more",
        "tc qdisc show; ethtool {interface}; iperf3 -c {second} on {first}",
    ),
    "all-reduce": Kind(
        "an all-reduce over all nodes ends, with the right sum",
        "GLOO_SOCKET_IFNAME={interface} NCCL_DEBUG=INFO hybridrl check --cluster",
    ),
    "shared-missing": Kind(
        "nodes see each other's files in run.dir", "findmnt -T {folder} on {node}; mount it there"
    ),
    "shared-unwritable": Kind(
        "run.dir can be written by every node", "touch {folder}/x on {node}; chown or remount it"
    ),
}
MOVES = {
    "run": "move run.dir",
    "temporary": "set TMPDIR",
    "cache": "set HYBRIDRL_CACHE",
    "shared memory": "mount -o remount,size=16G /dev/shm (docker run --shm-size=16g)",
}


@dataclass(frozen=True)
class PairFacts:
    """The link between two nodes; `backend` is "gloo" or "nccl", the rate that of one direction."""

    first: str
    second: str
    backend: str
    gb_per_s: float


@dataclass(frozen=True)
class ClusterFacts:
    """All nodes and what lies between them.

    Args:
        folder: Folder in which runs are written.
        nodes: Nodes that answered.
        unreachable: Last words of each node that did not.
        pairs: Measured links.
        all_reduce: (backend, GB/s or None, fault or empty) of each all-reduce over all nodes.
        unseen: Nodes whose files a node does not see in the folder, by its name.
    """

    folder: str = ""
    nodes: Sequence[NodeFacts] = ()
    unreachable: Mapping[str, str] = field(default_factory=dict)
    pairs: Sequence[PairFacts] = ()
    all_reduce: Sequence[tuple[str, float | None, str]] = ()
    unseen: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """Something that should be fixed.

    Args:
        kind: A key of KINDS.
        where: The node, GPU or pair.
        found: What is wrong there.
        remedy: What fixes it.
    """

    kind: str
    where: str
    found: str
    remedy: str

    @staticmethod
    def of(kind: str, where: str, found: str, **parts: object) -> Finding:
        """Returns a finding with its remedy filled in."""
        remedy = KINDS[kind].remedy.format(**{"node": where, **parts})
        return Finding(kind, where, found, remedy)


def judge(facts: ClusterFacts, ssh: str = "ssh") -> list[Finding]:
    """Returns all findings, in the order in which they should be fixed.

    Args:
        facts: Facts about the cluster.
        ssh: Command that reaches nodes, for remedies.
    """
    found = [
        Finding.of("node-unreachable", node, said, ssh=ssh)
        for node, said in facts.unreachable.items()
    ]
    for node in facts.nodes:
        found += [*_node(node, facts.folder), *_unconnected(node, facts)]
    for rule in (_differing, _clocks, _slow_gpus, _links):
        found += rule(facts)
    for name, unseen in facts.unseen.items():
        if unseen:
            said = f"{facts.folder} does not show files of {', '.join(unseen)}"
            found.append(Finding.of("shared-missing", name, said, folder=facts.folder))
    order = list(KINDS)
    return sorted(found, key=lambda one: order.index(one.kind))


def _node(node: NodeFacts, folder: str) -> Iterator[Finding]:
    """Judges a node by itself."""
    name = node.node
    for package, said, fix in node.problems:
        yield Finding.of("package", name, f"{package}: {said}", fix=fix)
    if max(len(node.gpus), node.num_gpus_on_bus) > node.num_torch_gpus:
        said = f"{node.num_gpus_on_bus} GPUs on the bus, nvidia-smi lists {len(node.gpus)}"
        yield Finding.of("gpus-unusable", name, f"{said}, torch can use {node.num_torch_gpus}")
    for gpu in node.gpus:
        where = f"{name} gpu {gpu.index}"
        if gpu.used_bytes > MAX_USED_GPU_BYTES:
            said = f"{_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)} are taken"
            yield Finding.of("gpu-memory", where, said)
        if gpu.ecc_errors:
            said = f"{gpu.ecc_errors} uncorrected memory errors"
            yield Finding.of("gpu-ecc", where, said, index=gpu.index)
        if gpu.fault:
            yield Finding.of("gpu-fault", where, gpu.fault, index=gpu.index)
    for other in node.unknown_names:
        yield Finding.of("name-unknown", name, f"does not know {other}", name=other)
    if node.address and node.own_address and node.own_address != node.address:
        said = f"its name means {node.own_address}, others reach it by {node.address}"
        yield Finding.of("name-elsewhere", name, said, interface=node.interface)
    if 0 <= node.max_files < MIN_FILES:
        said = f"{node.max_files} open files, fewer than {MIN_FILES}"
        yield Finding.of("files-limit", name, said)
    if node.has_rdma and node.max_locked_bytes >= 0:
        yield Finding.of("locked-memory", name, f"{node.max_locked_bytes >> 10} KiB")
    for use, (place, free_bytes) in node.free_bytes.items():
        least = MIN_FREE_BYTES[use]
        if free_bytes < least:
            said = f"{place} ({use}) has {_gib(free_bytes)} free, of {_gib(least)}"
            yield Finding.of("disk-full", name, said, folder=place, move=MOVES[use])
    if node.folder_fault:
        said = f"{folder}: {node.folder_fault}"
        yield Finding.of("shared-unwritable", name, said, folder=folder)


def _unconnected(node: NodeFacts, facts: ClusterFacts) -> Iterator[Finding]:
    """Judges the pairs of a node, each once, without the nodes that did not answer."""
    others = {other.node: other.unconnected for other in facts.nodes}
    for peer, fault in node.unconnected.items():
        if peer in others and (node.node < peer or node.node not in others[peer]):
            first, second = sorted((node.node, peer))
            said = f"from {node.node}: {fault}"
            where = f"{first} - {second}"
            yield Finding.of("pair-fails", where, said, first=first, second=second)


def _differing(facts: ClusterFacts) -> Iterator[Finding]:
    """Judges what should be the same on all nodes: those that differ from most are named."""
    names = dict.fromkeys(name for node in facts.nodes for name in node.versions)
    for name in names:
        values = [node.versions.get(name, "none") or "none" for node in facts.nodes]
        common = Counter(values).most_common(1)[0][0]
        for node, value in zip(facts.nodes, values, strict=True):
            if value != common:
                said = f"{name} {value}, the others {common}"
                yield Finding.of("differs", node.node, said, name=name, common=common)


def _clocks(facts: ClusterFacts) -> Iterator[Finding]:
    """Judges clocks against the median node's; for one or two nodes the asking host's."""
    ahead_s = sorted(node.clock_ahead_s for node in facts.nodes)
    middle = ahead_s[(len(ahead_s) - 1) // 2] if len(ahead_s) > 2 else 0.0
    for node in facts.nodes:
        off = node.clock_ahead_s - middle
        if abs(off) > MAX_CLOCK_S:
            said = f"its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
            yield Finding.of("clock", node.node, said)


def _slow_gpus(facts: ClusterFacts) -> Iterator[Finding]:
    rates: dict[str, list[tuple[str, GpuFacts, float]]] = {}
    for node in facts.nodes:
        for gpu in node.gpus:
            if gpu.tflops is not None:
                rates.setdefault(gpu.name, []).append((node.node, gpu, gpu.tflops))
    for alike in rates.values():
        bound = SLOW_GPU * median(tflops for _, _, tflops in alike)
        for name, gpu, tflops in alike:
            if tflops < bound:
                said = f"{tflops:.0f} TFLOP/s, below {bound:.0f}"
                yield Finding.of("gpu-slow", f"{name} gpu {gpu.index}", said, index=gpu.index)


def _links(facts: ClusterFacts) -> Iterator[Finding]:
    interfaces = {node.node: node.interface or "eth0" for node in facts.nodes}
    fastest = {
        backend: max(pair.gb_per_s for pair in facts.pairs if pair.backend == backend)
        for backend in {pair.backend for pair in facts.pairs}
    }
    for pair in facts.pairs:
        if pair.gb_per_s < (bound := SLOW_PAIR * fastest[pair.backend]):
            yield Finding.of(
                "pair-slow",
                f"{pair.first} - {pair.second}",
                f"{pair.backend}: {pair.gb_per_s:.3g} GB/s, below {bound:.3g}",
                interface=interfaces[pair.first],
                first=pair.first,
                second=pair.second,
            )
    for backend, _, fault in facts.all_reduce:
        if fault:
            interface = next(iter(interfaces.values()))
            yield Finding.of("all-reduce", "all nodes", f"{backend}: {fault}", interface=interface)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
