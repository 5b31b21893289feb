"""Derives the findings of `hybridrl check --cluster` from measured facts. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from hybridrl.services.cluster_check.probe import GpuFacts, NodeFacts

GIB = 2**30
MAX_CLOCK_S = 2.0  # File times order checkpoints, and show stale locks (older than 90 s).
MIN_FILES = 16_384  # A rank may open sockets to thousands of ranks, data files and caches.
MIN_FREE_BYTES = {"run": 20 * GIB, "temporary": 2 * GIB, "cache": 10 * GIB, "shared memory": GIB}
MAX_USED_GPU_BYTES = GIB  # An idle process's CUDA context uses about 0.5 GiB.
SLOW_GPU = 0.8  # Minimum share of equal GPUs' median rate; healthy GPUs differ by less than 10%.
SLOW_PAIR = 0.5  # Minimum share of the fastest pair's rate.


MOVES = {
    "run": "move run.dir",
    "temporary": "set TMPDIR",
    "cache": "set HYBRIDRL_CACHE",
    "shared memory": "mount -o remount,size=16G /dev/shm (docker run --shm-size=16g)",
}


@dataclass(frozen=True)
class PairFacts:
    """The rate of the link between two nodes over "gloo" or "nccl", in one direction."""

    first: str
    second: str
    backend: str
    gb_per_s: float


@dataclass(frozen=True)
class ClusterFacts:
    """Facts about all nodes and the links between them.

    Args:
        unreachable: Last line of output from each node that did not reply.
        all_reduce: For each all-reduce over all nodes: (backend, GB/s or None, error or "").
        unseen: For each node, the nodes whose files it cannot see in the folder.
    """

    folder: str = ""
    nodes: Sequence[NodeFacts] = ()
    unreachable: Mapping[str, str] = field(default_factory=dict)
    pairs: Sequence[PairFacts] = ()
    all_reduce: Sequence[tuple[str, float | None, str]] = ()
    unseen: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """A problem to fix. `where` names the node, GPU or pair."""

    kind: str
    where: str
    found: str
    remedy: str


def judge(facts: ClusterFacts, ssh: str = "ssh") -> list[Finding]:
    """Returns all findings. Remedies use `ssh` as the command to reach nodes."""
    found = [
        Finding("node-unreachable", node, reason, f"{ssh} {node} true")
        for node, reason in facts.unreachable.items()
    ]
    for node in facts.nodes:
        found += [*_software(node), *_names(node), *_room(node, facts.folder)]
    for rule in (_differing, _clocks, _slow_gpus, _links, _unseen):
        found += rule(facts)
    return found


def _software(node: NodeFacts) -> Iterator[Finding]:
    for package, found, fix in node.problems:
        yield Finding("package", node.node, f"{package}: {found}", fix)
    if max(len(node.gpus), node.num_gpus_on_bus) > node.num_torch_gpus:
        found = f"the PCI bus has {node.num_gpus_on_bus} GPUs, nvidia-smi lists {len(node.gpus)}, "
        found += f"and torch can use {node.num_torch_gpus}"
        fix = (
            "nvidia-smi (no driver: apt-get install nvidia-driver-580-server, in containers docker "
            "run --gpus all); unset CUDA_VISIBLE_DEVICES; python -c 'import torch; "
            "torch.cuda.init()'"
        )
        yield Finding("gpus-unusable", node.node, found, fix)
    for gpu in node.gpus:
        where, reset = f"{node.node} gpu {gpu.index}", f"nvidia-smi --gpu-reset -i {gpu.index}"
        if gpu.used_bytes > MAX_USED_GPU_BYTES:
            found = f"{_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)} are in use"
            fix = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv; end the processes"
            yield Finding("gpu-memory", where, found, fix)
        if gpu.ecc_errors:
            found = f"{gpu.ecc_errors} uncorrected memory errors"
            fix = f"{reset}; if errors return, replace the GPU"
            yield Finding("gpu-ecc", where, found, fix)
        if gpu.fault:
            yield Finding("gpu-fault", where, gpu.fault, f"dmesg | grep -i xid; {reset}")


def _names(node: NodeFacts) -> Iterator[Finding]:
    for other in node.unknown_names:
        fix = f"add {other} to /etc/hosts of {node.node}, or to DNS"
        yield Finding("name-unknown", node.node, f"cannot resolve the name {other}", fix)
    if node.address and node.own_address and node.own_address != node.address:
        found = f"its own name resolves to {node.own_address}, but other nodes use {node.address}"
        name = node.interface
        fix = f"export GLOO_SOCKET_IFNAME={name} NCCL_SOCKET_IFNAME={name}"
        yield Finding("name-elsewhere", node.node, found, fix)


def _room(node: NodeFacts, folder: str) -> Iterator[Finding]:
    name, for_good = node.node, "permanently in /etc/security/limits.conf"
    if 0 <= node.max_files < MIN_FILES:
        found = f"the limit on open files is {node.max_files}; needed: {MIN_FILES}"
        yield Finding("files-limit", name, found, f"ulimit -n 65536; {for_good}")
    if node.has_rdma and node.max_locked_bytes >= 0:
        found = f"the limit on locked memory is {node.max_locked_bytes >> 10} KiB; RDMA needs more"
        yield Finding("locked-memory", name, found, f"ulimit -l unlimited; {for_good}")
    for use, (place, free_bytes) in node.free_bytes.items():
        least = MIN_FREE_BYTES[use]
        if free_bytes < least:
            found = f"{place} ({use}) has {_gib(free_bytes)} free; needed: {_gib(least)}"
            fix = f"df -h {place}; delete files there, or {MOVES[use]}"
            yield Finding("disk-full", name, found, fix)
    if node.folder_fault:
        fix = f"touch {folder}/x on {name}; chown or remount it"
        yield Finding("shared-unwritable", name, f"{folder}: {node.folder_fault}", fix)


def _differing(facts: ClusterFacts) -> Iterator[Finding]:
    for name in dict.fromkeys(name for node in facts.nodes for name in node.versions):
        values = [node.versions.get(name, "none") or "none" for node in facts.nodes]
        common = Counter(values).most_common(1)[0][0]
        for node, value in zip(facts.nodes, values, strict=True):
            if value != common:
                found = f"{name} is {value}, but {common} on most nodes"
                fix = f"change {name} on {node.node} to {common}, or remove the node"
                yield Finding("differs", node.node, found, fix)


def _clocks(facts: ClusterFacts) -> Iterator[Finding]:
    """Compares each clock with the median, or with this host's if there are one or two nodes."""
    ahead_s = sorted(node.clock_ahead_s for node in facts.nodes)
    middle = ahead_s[(len(ahead_s) - 1) // 2] if len(ahead_s) > 2 else 0.0
    for node in facts.nodes:
        off = node.clock_ahead_s - middle
        if abs(off) > MAX_CLOCK_S:
            found = f"its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
            fix = "chronyc makestep, or: timedatectl set-ntp 1"
            yield Finding("clock", node.node, found, fix)


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
                found = f"{tflops:.0f} TFLOP/s; equal GPUs reach at least {bound:.0f}"
                fix = f"nvidia-smi -q -d PERFORMANCE,CLOCK,POWER -i {gpu.index}"
                yield Finding("gpu-slow", f"{name} gpu {gpu.index}", found, fix)


def _links(facts: ClusterFacts) -> Iterator[Finding]:
    nodes = {node.node: node for node in facts.nodes}
    for node in facts.nodes:
        for peer, fault in node.unconnected.items():
            other = nodes.get(peer)
            if other is not None and (node.node < peer or node.node not in other.unconnected):
                first, second = sorted((node.node, peer))
                fix = f"open TCP ports between {first} and {second}: nft list ruleset"
                found = f"from {node.node}: {fault}"
                yield Finding("pair-fails", f"{first} - {second}", found, fix)
    for pair in facts.pairs:
        rates = [other.gb_per_s for other in facts.pairs if other.backend == pair.backend]
        if pair.gb_per_s < (bound := SLOW_PAIR * max(rates)):
            name = nodes[pair.first].interface
            fix = f"tc qdisc show; ethtool {name}; iperf3 -c {pair.second} on {pair.first}"
            found = f"{pair.backend}: {pair.gb_per_s:.3g} GB/s; expected: at least {bound:.3g}"
            yield Finding("pair-slow", f"{pair.first} - {pair.second}", found, fix)
    for backend, _, fault in facts.all_reduce:
        if fault:
            name = facts.nodes[0].interface
            fix = f"GLOO_SOCKET_IFNAME={name} NCCL_DEBUG=INFO hybridrl check --cluster"
            yield Finding("all-reduce", "all nodes", f"{backend}: {fault}", fix)


def _unseen(facts: ClusterFacts) -> Iterator[Finding]:
    for name, unseen in facts.unseen.items():
        if unseen:
            found = f"{facts.folder} does not show files of {', '.join(unseen)}"
            fix = f"findmnt -T {facts.folder} on {name}; mount it there"
            yield Finding("shared-missing", name, found, fix)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
