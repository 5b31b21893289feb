"""What `hybridrl check --cluster` knows of nodes, before anything is judged. No torch.

Owns the records that nodes send as JSON. It measures nothing and judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

UNLIMITED = -1  # of a limit in bytes or files


@dataclass(frozen=True)
class GpuFacts:
    """One GPU as nvidia-smi and a short measurement say.

    Args:
        index: its number on the node, as nvidia-smi counts.
        name: of the product.
        total_bytes, used_bytes: of its memory, before anything was measured.
        ecc_errors: uncorrected errors since the node started; None: the GPU does not count them.
        tflops: of a bf16 matrix product; None: not measured.
        copy_gb_per_s: read plus written by a copy inside its memory; None: not measured.
        fault: what failed on it, else empty.
    """

    index: int
    name: str
    total_bytes: int = 0
    used_bytes: int = 0
    ecc_errors: int | None = None
    tflops: float | None = None
    copy_gb_per_s: float | None = None
    fault: str = ""


@dataclass(frozen=True)
class SpaceFacts:
    """A folder and the room on its file system.

    Args:
        folder: its path.
        use: "run", "temporary", "cache" or "shared memory".
        free_bytes: what may be written by this user.
    """

    folder: str
    use: str
    free_bytes: int


@dataclass(frozen=True)
class NodeFacts:
    """One node.

    Args:
        node: its name, as in the hostfile.
        host: what it calls itself.
        python: version.
        hybridrl: version.
        packages: installed versions; None: not installed.
        problems: of the report of plain `hybridrl check`: (name, found, fix).
        driver: NVIDIA driver's version, empty without one.
        torch_cuda: the CUDA that torch was built for, empty for none.
        has_gpu_hardware: whether the PCI bus has an NVIDIA GPU.
        gpus: as nvidia-smi lists them.
        num_torch_gpus: how many torch can use.
        missing_libraries: shared libraries that could not be opened, with the loader's message.
        max_files, max_locked_bytes: soft limits, UNLIMITED for none.
        has_rdma: whether there are InfiniBand or RoCE devices.
        free_memory_bytes: of the host.
        spaces: folders that runs write into.
        address: of the interface to the other nodes; empty where it was not found.
        interface: that interface.
        link_gbit_per_s: its rate as the kernel knows it; None where it does not.
        own_address: what the node's own host name means there.
        unknown_names: names of other nodes that it cannot resolve.
        cpu_gflops: float32 matrix product on one core; None: not measured.
        clock_ahead_s: how far its clock is ahead of the asking host's.
        clock_error_s: half the time that asking took.
    """

    node: str
    host: str = ""
    python: str = ""
    hybridrl: str = ""
    packages: dict[str, str | None] = field(default_factory=dict)
    problems: list[tuple[str, str, str]] = field(default_factory=list)
    driver: str = ""
    torch_cuda: str = ""
    has_gpu_hardware: bool = False
    gpus: list[GpuFacts] = field(default_factory=list)
    num_torch_gpus: int = 0
    missing_libraries: dict[str, str] = field(default_factory=dict)
    max_files: int = UNLIMITED
    max_locked_bytes: int = UNLIMITED
    has_rdma: bool = False
    free_memory_bytes: int | None = None
    spaces: list[SpaceFacts] = field(default_factory=list)
    address: str = ""
    interface: str = ""
    link_gbit_per_s: float | None = None
    own_address: str = ""
    unknown_names: list[str] = field(default_factory=list)
    cpu_gflops: float | None = None
    clock_ahead_s: float = 0.0
    clock_error_s: float = 0.0

    @staticmethod
    def from_json(found: Mapping[str, Any]) -> NodeFacts:
        """Returns what `asdict` wrote."""
        parts = {
            "gpus": [GpuFacts(**gpu) for gpu in found["gpus"]],
            "spaces": [SpaceFacts(**space) for space in found["spaces"]],
            "problems": [tuple(problem) for problem in found["problems"]],
        }
        return NodeFacts(**{**found, **parts})


@dataclass(frozen=True)
class PairFacts:
    """The link between two nodes, or two GPUs of one.

    Args:
        first, second: names of nodes, or `NODE gpu N`.
        backend: "tcp" (connecting), "gloo", "nccl" or "copy" (GPUs of one node).
        gb_per_s: of one direction, 1e9 bytes a second; None where it failed.
        fault: why.
    """

    first: str
    second: str
    backend: str
    gb_per_s: float | None = None
    fault: str = ""


@dataclass(frozen=True)
class SharedFacts:
    """What one node found of the file system that nodes share.

    Args:
        node: which.
        folder: where.
        write_mb_per_s, read_mb_per_s: of one file, synchronised; None where it failed.
        unseen: nodes whose file did not appear.
        differing: nodes whose file had other bytes than they wrote, or an older state.
        fault: why nothing could be written, else empty.
    """

    node: str
    folder: str
    write_mb_per_s: float | None = None
    read_mb_per_s: float | None = None
    unseen: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    fault: str = ""


@dataclass(frozen=True)
class ClusterFacts:
    """All nodes and what lies between them.

    Args:
        nodes: those that answered.
        unreachable: name of a node that did not, and what was said.
        pairs: links.
        all_reduce: (backend, 1e9 bytes a second of the algorithm, what went wrong or empty).
        shared: of each node.
    """

    nodes: list[NodeFacts]
    unreachable: dict[str, str] = field(default_factory=dict)
    pairs: list[PairFacts] = field(default_factory=list)
    all_reduce: list[tuple[str, float | None, str]] = field(default_factory=list)
    shared: list[SharedFacts] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Returns plain lists and objects."""
        return asdict(self)
