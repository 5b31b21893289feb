"""The one table of rollout engines: their names, and what other code may know of each. No torch.

Owns the names and traits, and the refusal of other names. Code outside this table and
the adapters reads traits; it never asks for an engine's name or class. An adapter is imported when
its engine is started (rollout/build.py), and its package is judged before any rank starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import PydanticKnownError

from hybridrl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EngineTraits:
    """Facts about an engine.

    Args:
        builder: `module:function` that builds it from rollout/build.py's EngineInputs.
        package: `module:name` of its EnginePackage; None: hybridrl's own dependencies are enough.
        computes: its tokens and log-probabilities come from the weights that it receives. It then
            has a `model` with HF's module names.
        is_tensor_parallel: a replica may be cut over `rollout.tp` ranks; else it is one rank.
        is_expert_parallel: a replica's experts may lie whole on its ranks (`rollout.ep`).
        has_fused_parameters: its parameters are laid out as `models/weights.py:fused_layout` says;
            else they are the HF checkpoint's tensors, whole.
        takes_experts: it runs mixtures of experts, and can be written with them.
        takes_expert_maps: a replica's whole experts may lie on its ranks in any order, so that they
            stay where they are trained; else in theirs.
        records_experts: it can tell which experts it chose for each token.
        sleeps: it gives weights and KV cache back while the policy trains, on GPUs; where csrc/ was
            compiled gradients lie in that memory meanwhile, so that both phases fit on a GPU that
            has no room for gradients beside an engine.
        shares_memory: its parameters can be the trainer's own memory where both cut a tensor alike.
        has_fixed_kv_cache: the KV cache is made at the start, for `rollout.max_batch` requests, and
            requests for which there is no room wait; else the cache grows with the requests.
        captures_graphs: it holds CUDA graphs and a workspace in both phases.
        bounds_positions: it refuses requests longer than the model's max_position_embeddings.
        lowest_temperature: the lowest that it samples at, but for 0.
        ends_by_text: it ends a response once its text has a stop string.
        penalizes: it can keep end tokens back and penalize tokens that were said.
        runs_on_gpus: `hybridrl plan` takes GPUs for granted, also on a host without any.
        has_fitted_times: constants of predicted times were fitted to measured steps with it; the
            generation of other engines is predicted with the same ones.
    """

    builder: str
    package: str | None = None
    computes: bool = True
    is_tensor_parallel: bool = False
    is_expert_parallel: bool = False
    has_fused_parameters: bool = False
    takes_experts: bool = False
    takes_expert_maps: bool = False
    records_experts: bool = False
    sleeps: bool = False
    shares_memory: bool = False
    has_fixed_kv_cache: bool = False
    captures_graphs: bool = False
    bounds_positions: bool = False
    lowest_temperature: float = 0.0
    ends_by_text: bool = False
    penalizes: bool = False
    runs_on_gpus: bool = False
    has_fitted_times: bool = False


@dataclass(frozen=True)
class EnginePackage:
    """A package that an engine needs and that is installed beside hybridrl.

    Args:
        is_installed: whether any build of it is there.
        installed_version: given whether the host is without GPUs, returns build and version; raises
            UserError where the package is missing or does not fit.
        model_rules: given a model's `ModelShape` and whether the host is without GPUs, the
            violations of models that it cannot run there.
        tested: builds and versions with which tests have run, as `installed_version` returns them,
            and where.
    """

    is_installed: Callable[[], bool]
    installed_version: Callable[[bool], str]
    model_rules: Callable[[Any, bool], Iterable[UserError]]
    tested: Mapping[str, str] = field(default_factory=dict)


ENGINES = {
    "hf": EngineTraits(
        builder="hybridrl.rollout.hf.adapter:build",
        takes_experts=True,
        records_experts=True,
        ends_by_text=True,
        penalizes=True,
    ),
    "vllm": EngineTraits(
        builder="hybridrl.rollout.vllm.adapter:build",
        package="hybridrl.rollout.vllm.version:PACKAGE",
        is_tensor_parallel=True,
        is_expert_parallel=True,
        takes_experts=True,
        takes_expert_maps=True,
        records_experts=True,
        has_fused_parameters=True,
        sleeps=True,
        shares_memory=True,
        has_fixed_kv_cache=True,
        captures_graphs=True,
        bounds_positions=True,
        lowest_temperature=0.01,
        ends_by_text=True,
        penalizes=True,
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
    ),
}


def usual_engine(has_gpus: bool) -> str:
    """Returns the engine that a starter configuration names: the first that runs on GPUs where
    there are any, else the first, which runs everywhere.
    """
    return next(name for name, traits in ENGINES.items() if traits.runs_on_gpus or not has_gpus)


def offered_engines() -> list[str]:
    """Returns the engines that users are offered: those that compute. `scripted`, which answers
    what a test tells it to, is accepted and never named.
    """
    return [name for name, traits in ENGINES.items() if traits.computes]


def known_engine(name: object) -> str:
    """Passes on the name of an engine in the table; raises PydanticKnownError if there is no such
    engine.
    """
    if isinstance(name, str) and name in ENGINES:
        return name
    *others, last = (repr(known) for known in offered_engines())
    raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})


def engine_package(name: str) -> EnginePackage | None:
    """Returns the package that an engine needs, None where it needs none; imports no engine."""
    path = ENGINES[name].package
    return None if path is None else named(path)


def named(path: str) -> Any:
    """Returns what a path `module:name` of the table names; imports the module."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
