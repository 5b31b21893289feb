"""The section `cluster` and `--cluster FILE`: GPUs, links and nodes that a plan assumes. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from hybridrl.config.section import Section
from hybridrl.errors import UserError

GPUS_PER_NODE = 8  # number on most training hosts


class ClusterConfig(Section):
    """The cluster that a plan assumes. If a key is null, its value comes from the GPU named by `gpu`, or else from this host. Rates are for one direction."""

    gpu: str | None = None
    """Known GPU whose memory and rates are used: H200, H100, H800, H20, A100, A800, B200 or L40S. The default is this host's GPU, or H100 if it has none."""
    nodes: int | None = Field(None, ge=1)
    """Number of nodes. By default it is computed from the number of ranks."""
    gpus_per_node: int | None = Field(None, ge=1)
    """Number of GPUs per node, all connected to each other. By default it is chosen to divide the number of ranks, up to this host's number of GPUs or 8, whichever is larger."""
    gpu_memory_gib: float | None = Field(None, gt=0)
    """Memory of one GPU in GiB (2**30 bytes), as CUDA reports it. The default is the known value for the GPU."""
    matrix_tflops: float | None = Field(None, gt=0)
    """Rate of large bf16 matrix products on one GPU, in 1e12 operations per second. The default is the known value for the GPU."""
    memory_gb_per_s: float | None = Field(None, gt=0)
    """Rate at which one GPU copies its own memory, counting both read and written bytes, in 1e9 bytes per second. The default is the known value for the GPU."""
    link_gb_per_s: float | None = Field(None, gt=0)
    """NVLink rate of one GPU, in 1e9 bytes per second. The default is the known value for the GPU."""
    host_gb_per_s: float | None = Field(None, gt=0)
    """Rate of copies between one GPU and pinned host memory, in 1e9 bytes per second. The default is the known value for the GPU."""
    nic_gb_per_s: float | None = Field(None, gt=0)
    """Rate of one network card, in 1e9 bytes per second. The default, 45, is 90% of the rate of a 400 Gbit/s card."""
    nics_per_node: int | None = Field(None, ge=1)
    """Number of network cards per node. The default is one per GPU."""
    latency_us: float | None = Field(None, ge=0)
    """Fixed time per message, in microseconds. The default is 10."""

    def world_size(self) -> int | None:
        """Returns the number of ranks on all nodes; None if `nodes` is not set."""
        return self.nodes and self.nodes * (self.gpus_per_node or GPUS_PER_NODE)


@dataclass(frozen=True)
class KnownGpu:
    """Memory, as CUDA reports it, and rates of one kind of GPU, in the units of ClusterConfig."""

    title: str
    memory_mib: int
    matrix_tflops: float
    memory_gb_per_s: float
    link_gb_per_s: float
    host_gb_per_s: float
    source: str


MEASURED = "measured (benchmarks/results/step_h200.json, reshard_h200.json)"
SHEET = "85% of the data sheet's, not measured"
KNOWN_GPUS = {
    "H200": KnownGpu("H200", 143_155, 680, 4200, 345, 46, MEASURED),
    "H100": KnownGpu("H100 80 GB", 81_079, 670, 2850, 345, 46, SHEET),
    "H800": KnownGpu("H800 80 GB", 81_079, 670, 2850, 160, 46, SHEET),
    "H20": KnownGpu("H20 96 GB", 97_871, 126, 3400, 345, 46, SHEET),
    "A100": KnownGpu("A100 80 GB", 81_153, 265, 1730, 240, 22, SHEET),
    "A800": KnownGpu("A800 80 GB", 81_153, 265, 1730, 160, 22, SHEET),
    "B200": KnownGpu("B200", 182_642, 1900, 6800, 690, 46, SHEET),
    "L40S": KnownGpu("L40S", 45_488, 300, 730, 22, 22, SHEET),
}


def known_gpu(name: str) -> KnownGpu | None:
    """Returns the known GPU whose name occurs in a text such as "NVIDIA H200"; None if none."""
    words = name.upper().replace("-", " ").replace("_", " ").split()
    return next((gpu for key, gpu in KNOWN_GPUS.items() if key in words), None)


def gpu_rule(cluster: ClusterConfig) -> UserError | None:
    """Returns the error for the name of an unknown GPU, or None."""
    if cluster.gpu is None or known_gpu(cluster.gpu) is not None:
        return None
    remedy = (
        "Name the most similar GPU, and set cluster.gpu_memory_gib, matrix_tflops, memory_gb_per_s "
        "and link_gb_per_s."
    )
    return UserError("cluster.gpu", cluster.gpu, ", ".join(KNOWN_GPUS), remedy)
