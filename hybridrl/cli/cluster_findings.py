"""What `hybridrl check --cluster` judges: facts in, findings out. No torch, no measurement.

Owns every kind of finding with its remedy, and the bounds. Invariant: a finding names the node or
pair, what was found, what was expected and one command or step that mends it.
docs/reference/cluster_check.md has the same table; a test compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from hybridrl.cli.cluster_facts import ClusterFacts, GpuFacts, NodeFacts, SharedFacts
from hybridrl.config.packages import PYTHON, REQUIRED

GIB = 2**30
MAX_CLOCK_S = 1.0  # file times of nodes order checkpoints and locks (stale after 90 s)
MIN_FILES = 16_384  # sockets of a rank to some thousand others, and files of data and caches
MIN_FREE_BYTES = {"run": 20 * GIB, "temporary": 2 * GIB, "cache": 10 * GIB, "shared memory": GIB}
MIN_MEMORY_BYTES = 4 * GIB
MAX_USED_GPU_BYTES = GIB  # a context of a process that should not be there has about half of it
SLOW = 0.8  # of the median of equal devices: clocks of healthy GPUs differ by less than 10%
SLOW_PAIR = 0.5  # of the median of pairs
LINK_SHARE = 0.5  # of what the link gives, which gloo over TCP reaches
TCP_GB_PER_S = 1.0  # one TCP stream is bound by a core: more is not asked of gloo
NCCL_SHARE = 0.6
NVLINK_GB_PER_S = {"H100": 450.0, "H200": 450.0, "A100": 300.0, "B200": 900.0}
PEAK_TFLOPS = {"H100 PCIe": 756, "H100": 989, "H200": 989, "A100": 312, "B200": 2250}
PEAK_SHARE = 0.5  # of a large bf16 product; healthy ones give 0.65 to 0.8
MIN_SHARED_MB_PER_S = 50.0  # below it a checkpoint of 7B with its optimizer takes over half an hour
# First driver of a CUDA major version, from NVIDIA's CUDA compatibility table.
DRIVERS = {"12": "525.60.13", "13": "580.65.06"}


class Kind(NamedTuple):
    """A kind of finding.

    Args:
        looks_at: what is judged and the bound.
        remedy: the command; braces are filled from the finding.
    """

    looks_at: str
    remedy: str


KINDS: dict[str, Kind] = {
    "node-unreachable": Kind("each node answers", "{ssh} {node} true"),
    "package": Kind("packages within the bounds of hybridrl and of engines", "{fix}"),
    "package-differs": Kind("the same versions on all nodes", "pip install '{name}=={common}'"),
    "python-differs": Kind(
        "the same Python on all nodes", "install Python {common} on {node}, as on the others"
    ),
    "hybridrl-differs": Kind(
        "the same hybridrl on all nodes", "pip install 'hybridrl=={common}' on {node}"
    ),
    "driver-missing": Kind(
        "a driver where there is a GPU", "apt-get install nvidia-driver-580-server; then reboot"
    ),
    "driver-old": Kind(
        "a driver that knows torch's CUDA",
        "install NVIDIA driver {least} or newer, or a torch built for an older CUDA",
    ),
    "driver-differs": Kind(
        "the same driver on all nodes", "install NVIDIA driver {common} on {node}"
    ),
    "library-missing": Kind(
        "GPU and network libraries open",
        "ldconfig -p | grep {library}; then {fix}",
    ),
    "gpus-unusable": Kind(
        "torch can use every GPU of the node",
        "unset CUDA_VISIBLE_DEVICES; nvidia-smi; pip install 'torch{torch}'",
    ),
    "gpus-differ": Kind(
        "the same number and kind of GPUs on all nodes",
        "run `nvidia-smi -L` on {node}; take it from the hostfile or give it fewer slots",
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
        "products and copies on every GPU end, and are right",
        "dmesg | grep -i xid; nvidia-smi --gpu-reset -i {index}",
    ),
    "gpu-slow": Kind(
        "matrix products within 80% of the median GPU, and half of the peak",
        "nvidia-smi -q -d PERFORMANCE,CLOCK,POWER -i {index}; look for throttling",
    ),
    "gpu-copy-slow": Kind(
        "copies inside GPU memory within 80% of the median GPU",
        "nvidia-smi -q -d CLOCK,ECC,ROW_REMAPPER -i {index}",
    ),
    "processor-slow": Kind(
        "matrix products of a core within half of the median node",
        "top -b -n 1 | head; cpupower frequency-set -g performance",
    ),
    "clock": Kind("clocks within 1 s of each other", "chronyc makestep, or: timedatectl set-ntp 1"),
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
    "memory": Kind("4 GiB of free host memory", "ps aux --sort=-rss | head; end what is left over"),
    "disk-full": Kind(
        "room: run folder 20 GiB, cache 10, temporary files 2, shared memory 1",
        "df -h {folder}; du -xsh {folder}/* | sort -h | tail; delete or {move}",
    ),
    "pair-fails": Kind(
        "every pair of nodes connects",
        "open TCP ports between {first} and {second}: nft list ruleset",
    ),
    "pair-slow": Kind(
        "half of what the link gives (gloo: at most 1 GB/s is asked), and of the median pair",
        "tc qdisc show; ethtool {interface}; iperf3 -c {second} on {first}",
    ),
    "all-reduce": Kind(
        "an all-reduce over all nodes ends, with the right sum",
        "GLOO_SOCKET_IFNAME={interface} NCCL_DEBUG=INFO hybridrl check --cluster",
    ),
    "shared-missing": Kind(
        "nodes see each other's files in run.dir", "findmnt -T {folder} on {node}; mount it there"
    ),
    "shared-stale": Kind(
        "nodes read what was written last",
        "mount -o remount,actimeo=1 {folder} on {node}, or lookupcache=none for NFS",
    ),
    "shared-slow": Kind(
        "50 MB/s of synchronised writes and of reads in run.dir",
        "nfsstat -m; put run.dir on another file system",
    ),
    "shared-unwritable": Kind(
        "run.dir can be written by every node", "touch {folder}/x on {node}; chown or remount it"
    ),
}


@dataclass(frozen=True)
class Finding:
    """Something that should be mended.

    Args:
        kind: a key of KINDS.
        where: the node, GPU or pair.
        found: what is wrong there, with its bound.
        remedy: what mends it.
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
    """Returns all findings, in the order in which they should be mended.

    Args:
        facts: of the cluster.
        ssh: the command that reaches nodes, for remedies.
    """
    found = [
        Finding.of("node-unreachable", node, said, ssh=ssh)
        for node, said in facts.unreachable.items()
    ]
    for node in facts.nodes:
        for rule in (_software, _gpu_software, _limits, _names):
            found += rule(node)
    found += [*_alike(facts.nodes), *_clocks(facts.nodes), *_speeds(facts.nodes)]
    found += [*_pairs(facts), *_all_reduce(facts)]
    for shared in facts.shared:
        found += _shared(shared)
    order = list(KINDS)
    return sorted(found, key=lambda one: order.index(one.kind))


def _software(node: NodeFacts) -> Iterator[Finding]:
    for name, said, fix in node.problems:
        yield Finding.of("package", node.node, f"{name}: {said}", fix=fix)
    if not SpecifierSet(PYTHON, prereleases=True).contains(node.python):
        fix = f"install Python {PYTHON} and hybridrl with it"
        yield Finding.of("package", node.node, f"python: {node.python}, not {PYTHON}", fix=fix)
    for name, wanted in REQUIRED.items():
        version = node.packages.get(name)
        said = f"{name}: {version or 'not installed'}, not {wanted}"
        is_right = version and SpecifierSet(wanted, prereleases=True).contains(version)
        if not is_right and not any(name == problem[0] for problem in node.problems):
            fix = f"pip install '{name}{wanted}'"
            yield Finding.of("package", node.node, said, fix=fix)


def _gpu_software(node: NodeFacts) -> Iterator[Finding]:
    if node.has_gpu_hardware and not node.driver:
        yield Finding.of("driver-missing", node.node, "an NVIDIA GPU without a driver")
    least = DRIVERS.get(node.torch_cuda.split(".")[0])
    if node.driver and least and _version(node.driver) < _version(least):
        said = f"driver {node.driver}; torch's CUDA {node.torch_cuda} needs {least}"
        yield Finding.of("driver-old", node.node, said, least=least)
    for library, message in node.missing_libraries.items():
        fix = f"pip install --force-reinstall 'torch{REQUIRED['torch']}'"
        if library.startswith("libcuda."):
            fix = "install the NVIDIA driver's libraries (in containers: docker run --gpus all)"
        if library.startswith("libibverbs"):
            fix = "apt-get install libibverbs1 ibverbs-providers"
        said = f"{library}: {message}"
        yield Finding.of("library-missing", node.node, said, library=library, fix=fix)
    if len(node.gpus) > node.num_torch_gpus:
        said = f"nvidia-smi lists {len(node.gpus)} GPUs, torch can use {node.num_torch_gpus}"
        yield Finding.of("gpus-unusable", node.node, said, torch=REQUIRED["torch"])
    for gpu in node.gpus:
        yield from _gpu(node, gpu)


def _gpu(node: NodeFacts, gpu: GpuFacts) -> Iterator[Finding]:
    where = f"{node.node} gpu {gpu.index}"
    if gpu.used_bytes > MAX_USED_GPU_BYTES:
        said = f"{_gib(gpu.used_bytes)} of {_gib(gpu.total_bytes)} are taken"
        yield Finding.of("gpu-memory", where, said)
    if gpu.ecc_errors:
        said = f"{gpu.ecc_errors} uncorrected memory errors"
        yield Finding.of("gpu-ecc", where, said, index=gpu.index)
    if gpu.fault:
        yield Finding.of("gpu-fault", where, gpu.fault, index=gpu.index)


def _limits(node: NodeFacts) -> Iterator[Finding]:
    if 0 <= node.max_files < MIN_FILES:
        said = f"{node.max_files} open files, fewer than {MIN_FILES}"
        yield Finding.of("files-limit", node.node, said)
    if node.has_rdma and node.max_locked_bytes >= 0:
        said = f"{node.max_locked_bytes >> 10} KiB of locked memory"
        yield Finding.of("locked-memory", node.node, said)
    if node.free_memory_bytes is not None and node.free_memory_bytes < MIN_MEMORY_BYTES:
        yield Finding.of("memory", node.node, f"{_gib(node.free_memory_bytes)} of memory free")
    moves = {
        "run": "move run.dir",
        "temporary": "set TMPDIR",
        "cache": "set HYBRIDRL_CACHE",
        "shared memory": "mount -o remount,size=16G /dev/shm (docker run --shm-size=16g)",
    }
    for space in node.spaces:
        least = MIN_FREE_BYTES[space.use]
        if space.free_bytes < least:
            said = (
                f"{space.folder} ({space.use}) has {_gib(space.free_bytes)} free, of {_gib(least)}"
            )
            yield Finding.of(
                "disk-full", node.node, said, folder=space.folder, move=moves[space.use]
            )


def _names(node: NodeFacts) -> Iterator[Finding]:
    for name in node.unknown_names:
        yield Finding.of("name-unknown", node.node, f"does not know {name}", name=name)
    if node.address and node.own_address and node.own_address != node.address:
        said = f"calls itself {node.own_address or 'nothing'}, others reach it by {node.address}"
        yield Finding.of("name-elsewhere", node.node, said, interface=node.interface)


def _alike(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Judges what should be the same everywhere: those unlike the most are named."""
    kinds: list[tuple[str, str, Callable[[NodeFacts], str]]] = [
        ("hybridrl-differs", "hybridrl", lambda node: node.hybridrl),
        ("python-differs", "python", lambda node: node.python),
        ("driver-differs", "driver", lambda node: node.driver or "none"),
        ("gpus-differ", "GPUs", _gpu_text),
    ]
    for kind, name, value in kinds:
        yield from _unlike(nodes, kind, name, value)
    for name in sorted({name for node in nodes for name in node.packages}):
        yield from _unlike(
            nodes,
            "package-differs",
            name,
            lambda node, name=name: node.packages.get(name) or "none",  # type: ignore[misc]
        )


def _unlike(
    nodes: Sequence[NodeFacts], kind: str, name: str, value: Callable[[NodeFacts], str]
) -> Iterator[Finding]:
    counts = Counter(value(node) for node in nodes)
    if len(counts) < 2:
        return
    common = counts.most_common(1)[0][0]
    for node in nodes:
        if value(node) != common:
            said = f"{name} {value(node)}, the others {common}"
            yield Finding.of(kind, node.node, said, name=name, common=common)


def _gpu_text(node: NodeFacts) -> str:
    counts = Counter(gpu.name for gpu in node.gpus)
    return ", ".join(f"{count} x {name}" for name, count in sorted(counts.items())) or "none"


def _clocks(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    """Judges clocks against the median node's, with what asking took as the error."""
    if not nodes:
        return
    middle = sorted(node.clock_ahead_s for node in nodes)[(len(nodes) - 1) // 2]
    # Of two nodes neither is the median: the asking host, at 0, decides.
    if len(nodes) < 3:
        middle = 0.0
    for node in nodes:
        off = node.clock_ahead_s - middle
        if abs(off) - node.clock_error_s > MAX_CLOCK_S:
            said = f"its clock is {abs(off):.1f} s {'ahead' if off > 0 else 'behind'}"
            yield Finding.of("clock", node.node, said)


def _speeds(nodes: Sequence[NodeFacts]) -> Iterator[Finding]:
    gpus = [(node, gpu) for node in nodes for gpu in node.gpus]
    for name in sorted({gpu.name for _, gpu in gpus}):
        alike = [(node, gpu) for node, gpu in gpus if gpu.name == name]
        peak = next((peak for key, peak in PEAK_TFLOPS.items() if key in name), 0)
        rates: list[tuple[str, str, Callable[[GpuFacts], float | None], float]] = [
            ("gpu-slow", "TFLOP/s", lambda gpu: gpu.tflops, peak * PEAK_SHARE),
            ("gpu-copy-slow", "GB/s of copies", lambda gpu: gpu.copy_gb_per_s, 0.0),
        ]
        for kind, unit, rate, least in rates:
            measured = [value for _, gpu in alike if (value := rate(gpu)) is not None]
            bound = max(least, SLOW * median(measured)) if measured else 0.0
            for node, gpu in alike:
                value = rate(gpu)
                if value is not None and value < bound:
                    where = f"{node.node} gpu {gpu.index}"
                    said = f"{value:.0f} {unit}, below {bound:.0f}"
                    yield Finding.of(kind, where, said, index=gpu.index)
    cores = [node.cpu_gflops for node in nodes if node.cpu_gflops is not None]
    for node in nodes:
        if node.cpu_gflops is not None and node.cpu_gflops < median(cores) / 2:
            said = f"{node.cpu_gflops:.1f} GFLOP/s of a core, the median {median(cores):.1f}"
            yield Finding.of("processor-slow", node.node, said)


def _pairs(facts: ClusterFacts) -> Iterator[Finding]:
    nodes = {node.node: node for node in facts.nodes}
    for backend in ("tcp", "gloo", "nccl", "copy"):
        pairs = [pair for pair in facts.pairs if pair.backend == backend]
        across = [pair.gb_per_s for pair in pairs if pair.first in nodes and pair.gb_per_s]
        within = [pair.gb_per_s for pair in pairs if pair.first not in nodes and pair.gb_per_s]
        for pair in pairs:
            where = f"{pair.first} - {pair.second}"
            ends = {"first": pair.first, "second": pair.second}
            if pair.gb_per_s is None:
                if pair.fault:
                    yield Finding.of("pair-fails", where, f"{backend}: {pair.fault}", **ends)
                continue
            rates = across if pair.first in nodes else within
            bound = max(
                SLOW_PAIR * median(rates), _expected(pair.first, pair.second, nodes, backend)
            )
            if pair.gb_per_s < bound:
                said = f"{backend}: {pair.gb_per_s:.3g} GB/s, below {bound:.3g}"
                interface = _interface(pair.first, nodes)
                yield Finding.of("pair-slow", where, said, interface=interface, **ends)


def _expected(first: str, second: str, nodes: dict[str, NodeFacts], backend: str) -> float:
    """Returns the GB/s that a healthy link gives at the least; 0 where the link is not known."""
    if first not in nodes or second not in nodes:  # GPUs of one node
        owner = nodes.get(first.rpartition(" gpu ")[0])
        name = owner.gpus[0].name if owner and owner.gpus else ""
        rate = next((rate for key, rate in NVLINK_GB_PER_S.items() if key in name), 0.0)
        return NCCL_SHARE * rate if "PCIe" not in name and "NVL" not in name else 0.0
    links = [nodes[name].link_gbit_per_s for name in (first, second)]
    known = [link / 8 for link in links if link]
    if not known:
        return 0.0
    return min(LINK_SHARE * min(known), TCP_GB_PER_S if backend != "nccl" else float("inf"))


def _interface(node: str, nodes: dict[str, NodeFacts]) -> str:
    return nodes[node].interface if node in nodes and nodes[node].interface else "eth0"


def _all_reduce(facts: ClusterFacts) -> Iterator[Finding]:
    for backend, _, fault in facts.all_reduce:
        if fault:
            first = facts.nodes[0].interface if facts.nodes else ""
            yield Finding.of(
                "all-reduce", "all nodes", f"{backend}: {fault}", interface=first or "eth0"
            )


def _shared(shared: SharedFacts) -> Iterator[Finding]:
    where, folder = shared.node, shared.folder
    if shared.fault:
        yield Finding.of("shared-unwritable", where, f"{folder}: {shared.fault}", folder=folder)
        return
    if shared.unseen:
        said = f"{folder} does not show files of {', '.join(shared.unseen)}"
        yield Finding.of("shared-missing", where, said, folder=folder)
    if shared.differing:
        said = f"{folder} gives old bytes of {', '.join(shared.differing)}"
        yield Finding.of("shared-stale", where, said, folder=folder)
    rates = (("writes", shared.write_mb_per_s), ("reads", shared.read_mb_per_s))
    for what, rate in rates:
        if rate is not None and rate < MIN_SHARED_MB_PER_S:
            said = f"{folder}: {rate:.0f} MB/s of {what}, below {MIN_SHARED_MB_PER_S:.0f}"
            yield Finding.of("shared-slow", where, said)


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
