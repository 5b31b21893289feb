"""Table of rollout engines: their names, and their traits, on which other code may rely. No torch.

Code outside this table and the adapters never checks an engine's name or class. rollout/build.py
imports an adapter when its engine starts; the engine's package is checked before any rank starts.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import PydanticKnownError

from hybridrl.errors import UserError
from hybridrl.versions import Support


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """Traits of a rollout engine.

    Args:
        builder: `module:function` that builds the engine from rollout/build.py's EngineInputs.
        package: `module:name` of its EnginePackage; None if the engine needs only hybridrl's own
            dependencies.
        computes: Whether tokens and log-probabilities come from the received weights. An engine
            with this trait has a `model` with HF's module names.
        is_tensor_parallel: Whether a replica may be split across `rollout.tp` ranks; otherwise each
            replica has one rank.
        is_expert_parallel: Whether a replica's ranks may hold whole experts (`rollout.ep`).
        has_fused_parameters: Whether its parameters have the layout of
            `models/weights.py:fused_layout`; otherwise they are the HF checkpoint's whole tensors.
        takes_experts: Whether it supports mixture-of-experts models.
        takes_expert_maps: Whether any rank of a replica may hold any expert, so that experts can
            stay where they are trained; otherwise the engine assigns experts in its own order.
        takes_recurrent_layers: Whether it supports models with recurrent layers (models/mixers.py).
        takes_adapters: Whether it can hold LoRA adapters next to the weights; otherwise it receives
            weights with the adapters merged into them.
        adapts_direct_latents: Whether these adapters may be on the first layers of latent attention
            whose queries are computed directly from the input.
        records_experts: Whether it can record the experts chosen for each token.
        reads_images: Whether prompts may contain images.
        sleeps: Whether it releases weights and KV cache on GPUs while the policy trains. If csrc/
            was compiled, gradients use that memory meanwhile, so that a GPU does not need room for
            both.
        shares_memory: Whether its parameters can be the trainer's own memory if both shard a tensor
            in the same way.
        has_fixed_kv_cache: Whether the KV cache is allocated at the start, for `rollout.max_batch`
            requests, and further requests wait; otherwise the cache grows with the requests.
        captures_graphs: Whether it keeps CUDA graphs and a workspace allocated in both phases.
        bounds_positions: Whether it rejects requests longer than the model's
            max_position_embeddings.
        lowest_temperature: Lowest temperature that it supports, apart from 0.
        highest_temperature: Highest temperature that it supports.
        ends_by_text: Whether it can end responses at stop strings.
        penalizes: Whether it supports minimum lengths and penalties.
        quantizes: Whether it can hold weights and KV cache in FP8 on GPUs (`rollout.quantization`,
            `rollout.kv_cache_dtype`).
        matches_exactly: Whether it can compute the same bits as the trainer (`numerics.match`).
        mixes_exactly: Whether this includes mixtures of experts.
        exact_attention: `module:function` of the attention with which the trainer then computes;
            None for the trainer's own. For CPU.
        exact_kernels: `module:object` of the `EngineKernels` with which the trainer computes on
            GPUs; None if it cannot compute the engine's bits there.
        max_stop_tokens: Maximum number of stop tokens in a request with a minimum length; None
            means no limit.
        runs_on_gpus: Whether `hybridrl plan` assumes that it runs on GPUs, even if the host has
            none.
        has_fitted_times: Whether the constants that predict step times were fitted to measurements
            with this engine. Predictions for other engines use the same constants.
    """

    builder: str
    package: str | None = None
    computes: bool = True
    is_tensor_parallel: bool = False
    is_expert_parallel: bool = False
    has_fused_parameters: bool = False
    takes_experts: bool = False
    takes_expert_maps: bool = False
    takes_recurrent_layers: bool = False
    takes_adapters: bool = False
    adapts_direct_latents: bool = False
    records_experts: bool = False
    reads_images: bool = False
    sleeps: bool = False
    shares_memory: bool = False
    has_fixed_kv_cache: bool = False
    captures_graphs: bool = False
    bounds_positions: bool = False
    lowest_temperature: float = 0.0
    highest_temperature: float = math.inf
    ends_by_text: bool = False
    penalizes: bool = False
    quantizes: bool = False
    matches_exactly: bool = False
    mixes_exactly: bool = False
    exact_attention: str | None = None
    exact_kernels: str | None = None
    max_stop_tokens: int | None = None
    runs_on_gpus: bool = False
    has_fitted_times: bool = False


@dataclass(frozen=True)
class EnginePackage:
    """A package that an engine needs in addition to hybridrl's dependencies.

    Args:
        is_installed: Function that returns whether any build of the package is installed.
        installed_version: Function that returns build and version, given whether the host has no
            GPUs. Raises UserError if the package is missing or does not suit the host.
        model_rules: Function that returns the reasons why the package cannot run a model, given a
            `ModelShape`, the name of the weights' data type, and whether the host has no GPUs.
        tested: For each tested build and version, as `installed_version` returns them, the devices
            on which tests ran.
        support: Takes whether the host has no GPUs; returns the supported versions.
        hybrid_request_bytes: For models with recurrent layers, function that returns the bytes of
            cache that a rank needs for a request, given a `ModelShape`, the request's length, the
            tensor-parallel size, and the bytes per element of keys and of the model. None if a
            request needs exactly its keys, values and states.
    """

    is_installed: Callable[[], bool]
    installed_version: Callable[[bool], str]
    model_rules: Callable[[Any, str, bool], Iterable[UserError]]
    tested: Mapping[str, str]
    support: Callable[[bool], Support]
    hybrid_request_bytes: Callable[[Any, int, int, int, int], int] | None = None


ENGINES = {
    "hf": EngineTraits(
        builder="hybridrl.rollout.hf.adapter:build",
        takes_experts=True,
        takes_recurrent_layers=True,
        takes_adapters=True,
        records_experts=True,
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
