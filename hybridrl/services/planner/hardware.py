"""Determines the cluster that `hybridrl plan` assumes, with the source of each value. No torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from hybridrl.config.cluster import (
    GPUS_PER_NODE,
    KNOWN_GPUS,
    ClusterConfig,
    KnownGpu,
    gpu_rule,
    known_gpu,
)
from hybridrl.config.yaml_text import read_yaml
from hybridrl.errors import ConfigError, UserError, error_text, short
from hybridrl.hybrid_engine.planning.nodes import LINK_GB_PER_S, Cluster
from hybridrl.parallel.host_gpus import Host

GIB = 2**30
NO_BOUND_GIB = 2.0**20  # stands for unlimited memory, on hosts without GPUs
DEFAULT_GPU = KNOWN_GPUS["H100"]
NVLINK_4 = "NVLink 4, as in H100 and H200, where 330 to 363 were measured"
# Default rates, each with its reason, which the report prints.
RATES = {
    "nic_gb_per_s": (45.0, "a 400 Gbit/s card at 90%, not measured"),
    "latency_us": (10.0, "for a message between nodes, not measured"),
}


ClusterFile = ClusterConfig
"""A cluster file has the same keys as the section `cluster`, and overrides it."""


class Assumed(NamedTuple):
    value: float
    source: str


@dataclass(frozen=True)
class Assumptions:
    """Cluster that a plan assumes, with each value's source; the maximum includes unused GPUs."""

    cluster: Cluster
    gpu_memory_bytes: int
    max_gpus_per_node: int
    values: dict[str, Assumed]


INLINE = re.compile(r"(?:(\d+)x)?(\d+)x([A-Za-z][\w-]*)")


def load_cluster(path: Path) -> ClusterFile:
    """Reads a cluster file in YAML or JSON, or parses NODESxGPUSxTYPE, as in `8x8xH200`.

    Raises:
        ConfigError: The file cannot be read, or keys are wrong; each wrong key has an error.
    """
    fields = ClusterFile.model_fields
    keys = "the keys " + ", ".join(fields)
    allowed = f"YAML or JSON with {keys}; or NODESxGPUSxTYPE, such as 8x8xH200"
    try:
        if (match := INLINE.fullmatch(str(path))) is not None and not path.exists():
            nodes, gpus, gpu = match.groups()
            return ClusterFile(nodes=int(nodes or 1), gpus_per_node=int(gpus), gpu=gpu)
        content = OmegaConf.to_container(read_yaml(path, allowed), resolve=True)
        return ClusterFile.model_validate(content)
    except UserError as error:
        raise ConfigError([error]) from None
    except OmegaConfBaseException as error:  # an OmegaConf interpolation cannot be resolved
        raise ConfigError(
            [UserError(str(path), error_text(error), allowed, "Fix the file.")]
        ) from None
    except ValidationError as error:
        violations = []
        for found in error.errors():
            key = ".".join(map(str, found["loc"]))
            possible = found["msg"].removeprefix("Input should be ") if key in fields else keys
            remedy = f"Set {key}. {fields[key].description}" if key in fields else "Remove it."
            name = f"{path}: {key}" if key else str(path)
            violations.append(UserError(name, short(found["input"]), possible, remedy))
        raise ConfigError(violations) from None


def assume(
    given: ClusterFile, world_size: int, host: Host
) -> tuple[Assumptions | None, list[UserError]]:
    """Fills in unset values; returns errors instead for wrong sizes or an unknown GPU."""
    if (unknown := gpu_rule(given)) is not None:
        return None, [unknown]
    sizes = _sizes(given, world_size, host)
    if isinstance(sizes, UserError):
        return None, [sizes]
    values = dict(sizes)
    nodes, gpus = int(sizes["nodes"].value), int(sizes["gpus_per_node"].value)
    kind = known_gpu(given.gpu or "") or (known_gpu(host.gpu.name) if host.gpu else None)
    if given.gpu_memory_gib is not None:
        memory, source = int(given.gpu_memory_gib * GIB), "--cluster"
    elif given.gpu is not None and kind is not None:
        memory, source = kind.memory_mib << 20, f"{kind.title}, as set by cluster.gpu"
    elif host.gpu is not None:
        memory, source = host.gpu.memory_bytes, f"{host.gpu.name} of this host"
    else:
        memory = DEFAULT_GPU.memory_mib << 20
        source = f"{DEFAULT_GPU.title}, a common GPU for training"
    values["gpu_memory_gib"] = Assumed(memory / GIB, source)
    for key, (value, reason) in {**_rates_of(kind or DEFAULT_GPU), **RATES}.items():
        own = getattr(given, key)
        values[key] = Assumed(value, reason) if own is None else Assumed(own, "--cluster")
    nics = given.nics_per_node
    of_gpus = Assumed(gpus, "one per GPU")
    values["nics_per_node"] = of_gpus if nics is None else Assumed(nics, "--cluster")
    cluster = Cluster(
        nodes=nodes,
        gpus_per_node=gpus,
        link_gb_per_s=values["link_gb_per_s"].value,
        nic_gb_per_s=values["nic_gb_per_s"].value,
        nics_per_node=int(values["nics_per_node"].value),
        latency_us=values["latency_us"].value,
    )
    ordered = {key: values[key] for key in ClusterFile.model_fields if key != "gpu"}
    most = given.gpus_per_node or max(GPUS_PER_NODE, host.num_gpus, gpus)
    return Assumptions(cluster, memory, most, ordered), []


def _rates_of(kind: KnownGpu) -> dict[str, tuple[float, str]]:
    reason = f"{kind.title}, {kind.source}"
    link = NVLINK_4 if kind.link_gb_per_s == LINK_GB_PER_S else reason
    return {
        "matrix_tflops": (kind.matrix_tflops, reason),
        "memory_gb_per_s": (kind.memory_gb_per_s, reason),
        "link_gb_per_s": (kind.link_gb_per_s, link),
        "host_gb_per_s": (kind.host_gb_per_s, reason),
    }


def merged(section: ClusterConfig, given: ClusterConfig | None) -> ClusterConfig | None:
    """Returns the section `cluster` with a cluster file's keys; None if neither sets a key."""
    keys = section.model_dump(exclude_none=True)
    if given is not None:
        keys |= given.model_dump(exclude_none=True)
    return ClusterConfig(**keys) if keys or given is not None else None


def _sizes(given: ClusterFile, world_size: int, host: Host) -> dict[str, Assumed] | UserError:
    """Returns the number of nodes, and the number of GPUs per node that have a rank."""
    nodes, gpus = given.nodes, given.gpus_per_node
    source, derived = "--cluster", "derived from the number of ranks"
    if nodes is not None and gpus is not None:
        if nodes * gpus != world_size:
            remedy = "Change the cluster file or the world size."
            allowed = f"the world size {world_size}"
            return UserError("nodes * gpus_per_node", f"{nodes} * {gpus}", allowed, remedy)
        return {"nodes": Assumed(nodes, source), "gpus_per_node": Assumed(gpus, source)}
    divisor = f"a divisor of the world size {world_size}"
    if nodes is not None:
        if world_size % nodes:
            return UserError("nodes", nodes, divisor, "Change nodes or --world.")
        per_node = Assumed(world_size // nodes, derived)
        return {"nodes": Assumed(nodes, source), "gpus_per_node": per_node}
    if gpus is not None:
        gpus = min(gpus, world_size)
        if world_size % gpus:
            return UserError("gpus_per_node", gpus, divisor, "Change gpus_per_node or --world.")
    else:
        most = max(GPUS_PER_NODE, host.num_gpus)
        gpus = max(size for size in range(1, most + 1) if world_size % size == 0)
        usual = f"at most {most}, the usual number in a GPU host"
        source = "as on this host" if most > GPUS_PER_NODE else usual
    return {"nodes": Assumed(world_size // gpus, derived), "gpus_per_node": Assumed(gpus, source)}
