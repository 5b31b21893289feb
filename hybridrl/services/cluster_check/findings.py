"""Judges what `hybridrl check --cluster` has measured: facts in, findings out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from hybridrl.services.cluster_check.probe import GpuFacts, NodeFacts

GIB = 2**30
MAX_CLOCK_S = 2.0  # file times of nodes order checkpoints and locks (stale after 90 s)
MIN_FILES = 16_384  # sockets of a rank to some thousand others, and files of data and caches
MIN_FREE_BYTES = {"run": 20 * GIB, "temporary": 2 * GIB, "cache": 10 * GIB, "shared memory": GIB}
MAX_USED_GPU_BYTES = GIB  # the context of a process that should not be there has about half of it
SLOW_GPU = 0.8  # of the median of equal GPUs: clocks of healthy ones differ by less than 10%
SLOW_PAIR = 0.5  # of the fastest pair


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
    """Something that should be fixed; `where` is the node, GPU or pair."""

    kind: str
    where: str
    found: str
    remedy: str


def judge(facts: ClusterFacts, ssh: str = "ssh") -> list[Finding]:
    """Returns all findings; `ssh` is the command that reaches nodes, for remedies."""
    found = [
        Finding("node-unreachable", node, said, f"{ssh} {node} true")
        for node, said in facts.unreachable.items()
    ]
    for node in facts.nodes:
        found += [*_software(node), *_names(node), *_room(node, facts.folder)]
    for rule in (_differing, _clocks, _slow_gpus, _links, _unseen):
        found += rule(facts)
    return found


def _software(node: NodeFacts) -> Iterator[Finding]:
    """Judges the packages and the GPUs of a node."""
    for package, said, fix in node.problems:
        yield Finding("package", node.node, f"{package}: {said}", fix)
    if max(len(node.gpus), node.num_gpus_on_bus) > node.num_torch_gpus:
        said = f"{node.num_gpus_on_bus} GPUs on the bus, nvidia-smi lists {len(node.gpus)}"
        said += f", torch can use {node.num_torch_gpus}"
        fix = (
            "nvidia-smi (no driver: apt-get install nvidia-driver-580-server, in containers docker "
            "run --gpus all); unset CUDA_VISIBLE_DEVICES; python -c 'import torch; "
            "torch.cuda.init()'"
        )
        yield Finding("gpus-unusable", node.node, said, fix)
    for gpu in node.gpus:
        where, reset = f"{node.node} gpu {gpu.index}", f"nvidia-smi --gpu-reset -i {gpu.index}"
        if gpu.used_bytes > MAX_USED_GPU_BYTES:
            said = f"{_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)} are taken"
            fix = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv; end what is left"
            yield Finding("gpu-memory", where, said, fix)
        if gpu.ecc_errors:
            said = f"{gpu.ecc_errors} uncorrected memory errors"
            fix = f"{reset}; if errors return, replace the GPU"
            yield Finding("gpu-ecc", where, said, fix)
        if gpu.fault:
            yield Finding("gpu-fault", where, gpu.fault, f"dmesg | grep -i xid; {reset}")


def _names(node: NodeFacts) -> Iterator[Finding]:
    for other in node.unknown_names:
        fix = f"add {other} to /etc/hosts of {node.node}, or to DNS"
        yield Finding("name-unknown", node.node, f"does not know {other}", fix)
    if node.address and node.own_address and node.own_address != node.address:
        said = f"its name means {node.own_address}, others reach it by {node.address}"
        name = node.interface
        fix = f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
        yield Finding("name-elsewhere", node.node, said, fix)


def _room(node: NodeFacts, folder: str) -> Iterator[Finding]:
    """Judges limits and disk space of a node."""
    name, for_good = node.node, "for good in /etc/security/limits.conf"
    if 0 <= node.max_files < MIN_FILES:
        said = f"{node.max_files} open files, fewer than {MIN_FILES}"
        yield Finding("files-limit", name, said, f"ulimit -n 65536; {for_good}")
    if node.has_rdma and node.max_locked_bytes >= 0:
        said = f"{node.max_locked_bytes >> 10} KiB of locked memory, and RDMA"
        yield Finding("locked-memory", name, said, f"ulimit -l unlimited; {for_good}")
    for use, (place, free_bytes) in node.free_bytes.items():
        least = MIN_FREE_BYTES[use]
        if free_bytes < least:
            said = f"{place} ({use}) has {_gib(free_bytes)} free, of {_gib(least)}"
            fix = f"df -h {place}; delete files there, or {MOVES[use]}"
            yield Finding("disk-full", name, said, fix)
    if node.folder_fault:
        fix = f"touch {folder}/x on {name}; chown or remount it"
        yield Finding("shared-unwritable", name, f"{folder}: {node.folder_fault}", fix)


def _differing(facts: ClusterFacts) -> Iterator[Finding]:
    """Judges what should be the same on all nodes: those that differ from most are named."""
    for name in dict.fromkeys(name for node in facts.nodes for name in node.versions):
        values = [node.versions.get(name, "none") or "none" for node in facts.nodes]
        common = Counter(values).most_common(1)[0][0]
        for node, value in zip(facts.nodes, values, strict=True):
            if value != common:
                said = f"{name} {value}, the others {common}"
                fix = f"bring {name} on {node.node} to {common}, or leave the node out"
                yield Finding("differs", node.node, said, fix)


def _clocks(facts: ClusterFacts) -> Iterator[Finding]:
    """Judges clocks against the median node's; for one or two nodes the asking host's."""
    ahead_s = sorted(node.clock_ahead_s for node in facts.nodes)
    middle = ahead_s[(len(ahead_s) - 1) // 2] if len(ahead_s) > 2 else 0.0
    for node in facts.nodes:
        off = node.clock_ahead_s - middle
        if abs(off) > MAX_CLOCK_S:
            said = f"its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
            fix = "chronyc makestep, or: timedatectl set-ntp 1"
            yield Finding("clock", node.node, said, fix)


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
                fix = f"nvidia-smi -q -d PERFORMANCE,CLOCK,POWER -i {gpu.index}"
                yield Finding("gpu-slow", f"{name} gpu {gpu.index}", said, fix)


def _links(facts: ClusterFacts) -> Iterator[Finding]:
    """Judges links between nodes, without the nodes that did not answer."""
    nodes = {node.node: node for node in facts.nodes}
    for node in facts.nodes:
        for peer, fault in node.unconnected.items():
            other = nodes.get(peer)
            if other is not None and (node.node < peer or node.node not in other.unconnected):
                first, second = sorted((node.node, peer))
                fix = f"open TCP ports between {first} and {second}: nft list ruleset"
                said = f"from {node.node}: {fault}"
                yield Finding("pair-fails", f"{first} - {second}", said, fix)
    for pair in facts.pairs:
        rates = [other.gb_per_s for other in facts.pairs if other.backend == pair.backend]
        if pair.gb_per_s < (bound := SLOW_PAIR * max(rates)):
            name = nodes[pair.first].interface
            fix = f"tc qdisc show; ethtool {name}; iperf3 -c {pair.second} on {pair.first}"
            said = f"{pair.backend}: {pair.gb_per_s:.3g} GB/s, below {bound:.3g}"
            yield Finding("pair-slow", f"{pair.first} - {pair.second}", said, fix)
    for backend, _, fault in facts.all_reduce:
        if fault:
            name = facts.nodes[0].interface
            fix = f"GLOO_SOCKET_IFNAME={name} NCCL_DEBUG=INFO hybridrl check --cluster"
            yield Finding("all-reduce", "all nodes", f"{backend}: {fault}", fix)


def _unseen(facts: ClusterFacts) -> Iterator[Finding]:
    for name, unseen in facts.unseen.items():
        if unseen:
            said = f"{facts.folder} does not show files of {', '.join(unseen)}"
            fix = f"findmnt -T {facts.folder} on {name}; mount it there"
            yield Finding("shared-missing", name, said, fix)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
