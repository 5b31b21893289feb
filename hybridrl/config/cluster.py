"""The section `cluster`: what GPUs, links and nodes a plan may count on. No torch.

Owns its keys, which `--cluster FILE` has too, and the rates of known GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from hybridrl.config.section import Section
from hybridrl.errors import UserError

GPUS_PER_NODE = 8  # of most hosts of training


class ClusterConfig(Section):
    """The cluster of a run. A key that is None is this host's, or that of the named GPU; rates are
    those of one direction.
    """

    gpu: str | None = None
    """A known GPU: H200, H100, H800, H20, A100, A800, B200 or L40S, whose memory and rates are taken. None: this host's, else H100."""
    nodes: int | None = Field(None, ge=1)
    """Number of nodes. None: what the ranks ask for."""
    gpus_per_node: int | None = Field(None, ge=1)
    """GPUs of a node, all linked to each other. None: at most 8, or as this host."""
    gpu_memory_gib: float | None = Field(None, gt=0)
    """Memory of one GPU, 2**30 bytes, as CUDA reports it. None: that of the GPU."""
    matrix_tflops: float | None = Field(None, gt=0)
    """Rate of large bf16 matrix products of one GPU, 1e12 operations a second. None: that of the GPU."""
    memory_gb_per_s: float | None = Field(None, gt=0)
    """Rate at which one GPU copies its memory, read and written bytes together, 1e9 a second. None: that of the GPU."""
    link_gb_per_s: float | None = Field(None, gt=0)
    """NVLink of one GPU, 1e9 bytes a second. None: that of the GPU."""
    host_gb_per_s: float | None = Field(None, gt=0)
    """Copies between one GPU and pinned host memory, 1e9 bytes a second. None: that of the GPU."""
    nic_gb_per_s: float | None = Field(None, gt=0)
    """One network card, 1e9 bytes a second. None: 45, a card of 400 Gbit/s at 90%."""
    nics_per_node: int | None = Field(None, ge=1)
    """Network cards of a node. None: one for each GPU."""
    latency_us: float | None = Field(None, ge=0)
    """Fixed cost of one message, microseconds. None: 10."""

    def world_size(self) -> int | None:
        """Returns the number of ranks of all nodes; None where the nodes are not given."""
        return self.nodes and self.nodes * (self.gpus_per_node or GPUS_PER_NODE)


@dataclass(frozen=True)
class KnownGpu:
    """What a kind of GPU does.

    Args:
        title: as people write it.
        memory_mib: as CUDA reports it.
        matrix_tflops, memory_gb_per_s, link_gb_per_s, host_gb_per_s: as of ClusterConfig.
        source: where the rates are from.
    """

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
    """Returns the kind of GPU that a name is of, as "NVIDIA H200"; None: it is not known."""
    words = name.upper().replace("-", " ").replace("_", " ").split()
    return next((gpu for key, gpu in KNOWN_GPUS.items() if key in words), None)


def gpu_rule(cluster: ClusterConfig) -> UserError | None:
    """Returns what is wrong with the name of the GPU; None: nothing."""
    if cluster.gpu is None or known_gpu(cluster.gpu) is not None:
        return None
    return UserError(
        "cluster.gpu",
        cluster.gpu,
        ", ".join(KNOWN_GPUS),
        "Name one that is like yours and set gpu_memory_gib, matrix_tflops, memory_gb_per_s and "
        "link_gb_per_s.",
    )
