"""Table of rollout engines: their names, and their traits, on which other code may rely. No torch.

Code outside this table and the adapters never checks an engine's name or class. rollout/build.py
imports an adapter when its engine starts; the engine's package is checked before any rank starts.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticKnownError

from hybridrl.errors import UserError
from hybridrl.versions import Support


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """Traits of a rollout engine."""

    builder: str  # `module:function` that builds the engine from rollout/build.py's EngineInputs
    package: str | None = None  # `module:name` of its EnginePackage, if it needs any
    computes: bool = True  # whether tokens come from the received weights (ComputingEngine)
    is_tensor_parallel: bool = False  # whether `rollout.tp` ranks may share a replica
    is_expert_parallel: bool = False  # whether ranks may hold whole experts (`rollout.ep`)
    has_fused_parameters: bool = False  # whether they match `fused_layout`, not HF tensors
    takes_experts: bool = False  # whether it supports mixture-of-experts models
    takes_expert_maps: bool = False  # whether any rank may hold any expert
    takes_recurrent_layers: bool = False  # see models/mixers.py
    takes_adapters: bool = False  # whether weights need not be merged
    # Whether adapters may be on the first layers of latent attention whose queries are computed
    # directly from the input.
    adapts_direct_latents: bool = False
    records_experts: bool = False  # whether it can record the experts chosen for each token
    max_likely: int = 0  # most probable tokens that it can record at each position
    reads_images: bool = False  # whether prompts may contain images
    # Numbers in a patch that a kind of vision tower reads; other kinds read any.
    patch_sizes: Mapping[str, int] = field(default_factory=dict)
    # Whether it releases weights and KV cache on GPUs while the policy trains. If csrc/ was
    # compiled, gradients use that memory meanwhile.
    sleeps: bool = False
    shares_memory: bool = False  # whether its parameters may be the trainer's own memory
    has_fixed_kv_cache: bool = False  # whether the start allocates it for `rollout.max_batch`
    captures_graphs: bool = False  # whether it keeps CUDA graphs and a workspace forever
    bounds_positions: bool = False  # whether max_position_embeddings limits requests
    lowest_temperature: float = 0.0  # lowest temperature that it supports, apart from 0
    highest_temperature: float = math.inf  # highest temperature that it supports
    ends_by_text: bool = False  # whether it can end responses at stop strings
    penalizes: bool = False  # whether it supports minimum lengths and penalties
    quantizes: bool = False  # whether it can hold weights and KV cache in FP8 on GPUs
    matches_exactly: bool = False  # whether it can compute the trainer's bits
    mixes_exactly: bool = False  # whether this includes mixtures of experts
    exact_attention: str | None = None  # `module:function` with which the trainer attends on CPUs
    exact_kernels: str | None = None  # `module:object`, the trainer's EngineKernels on GPUs
    max_stop_tokens: int | None = None  # in requests with a minimum length; None for any number
    runs_on_gpus: bool = False  # whether `hybridrl plan` assumes GPUs on any host
    has_fitted_times: bool = False  # whether predictions were fitted to its step times


@dataclass(frozen=True)
class EnginePackage:
    """A package that an engine needs in addition to hybridrl's dependencies."""

    is_installed: Callable[[], bool]  # whether any build is installed
    # Returns build and version, given whether the host has no GPUs. Raises UserError if the package
    # is missing or does not suit the host.
    installed_version: Callable[[bool], str]
    # Yields why the package cannot run a model, given its `ModelShape`, the name of the weights'
    # data type, and whether the host has no GPUs.
    model_rules: Callable[[Any, str, bool], Iterable[UserError]]
    tested: Mapping[str, str]  # tested versions and the devices of the tests
    support: Callable[[bool], Support]  # given whether the host has no GPUs
    # Returns the bytes of cache that a rank needs for a request to a model with recurrent layers,
    # given `ModelShape`, length, tensor-parallel size, and bytes per element of keys and of the
    # model. None if the cache stores exactly the request's keys, values and states.
    hybrid_request_bytes: Callable[[Any, int, int, int, int], int] | None = None


ENGINES = {
    "hf": EngineTraits(
        builder="hybridrl.rollout.hf.adapter:build",
        takes_experts=True,
        takes_recurrent_layers=True,
        takes_adapters=True,
        records_experts=True,
        max_likely=1024,
        reads_images=True,
        ends_by_text=True,
        penalizes=True,
        matches_exactly=True,
        mixes_exactly=True,
    ),
    "vllm": EngineTraits(
        builder="hybridrl.rollout.vllm.adapter:build",
        package="hybridrl.rollout.vllm.version:PACKAGE",
        is_tensor_parallel=True,
        is_expert_parallel=True,
        takes_experts=True,
        takes_expert_maps=True,
        takes_recurrent_layers=True,
        records_experts=True,
        max_likely=1024,
        reads_images=True,
        takes_adapters=True,
        adapts_direct_latents=True,
        has_fused_parameters=True,
        sleeps=True,
        shares_memory=True,
        has_fixed_kv_cache=True,
        captures_graphs=True,
        bounds_positions=True,
        lowest_temperature=0.01,
        highest_temperature=2.0,
        ends_by_text=True,
        penalizes=True,
        quantizes=True,
        matches_exactly=True,
        exact_attention="hybridrl.rollout.vllm.exact:attend",
        exact_kernels="hybridrl.rollout.vllm.exact_gpu:KERNELS",
        max_stop_tokens=128,  # the maximum that vLLM's second model runner can exclude
        runs_on_gpus=True,
        has_fitted_times=True,
    ),
    "sglang": EngineTraits(
        builder="hybridrl.rollout.sglang.adapter:build",
        package="hybridrl.rollout.sglang.version:PACKAGE",
        is_tensor_parallel=True,
        is_expert_parallel=True,
        takes_experts=True,
        records_experts=True,
        reads_images=True,
        # SGLang takes pixel values of another size for features (0.5.16 to 0.5.23). These are
        # channels, frames, height and width, as in published models.
        patch_sizes={"qwen2_5_vl": 3 * 2 * 14 * 14},
        takes_adapters=True,
        has_fused_parameters=True,
        sleeps=True,
        shares_memory=True,
        has_fixed_kv_cache=True,
        captures_graphs=True,
        bounds_positions=True,
        ends_by_text=True,
        penalizes=True,
        runs_on_gpus=True,
    ),
    "scripted": EngineTraits(
        builder="hybridrl.rollout.scripted:build",
        computes=False,
        takes_experts=True,
        takes_recurrent_layers=True,
    ),
}


def usual_engine(has_gpus: bool) -> str:
    """Returns the engine for a starter configuration: the first that suits the host."""
    return next(name for name, traits in ENGINES.items() if traits.runs_on_gpus or not has_gpus)


def offered_engines() -> list[str]:
    """Returns the engines to list; not `scripted`, which replays a test's responses."""
    return [name for name, traits in ENGINES.items() if traits.computes]


def known_engine(name: object) -> str:
    """Returns the name if the table contains it; otherwise raises PydanticKnownError."""
    if isinstance(name, str) and name in ENGINES:
        return name
    *others, last = (repr(known) for known in offered_engines())
    raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})


def engine_package(name: str) -> EnginePackage | None:
    """Returns the package that an engine needs, if any, without importing the engine."""
    path = ENGINES[name].package
    return None if path is None else load_symbol(path)


def load_symbol(path: str) -> Any:
    """Imports and returns the object that a path `module:name` refers to."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
