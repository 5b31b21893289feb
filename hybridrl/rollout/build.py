"""Inputs of rollout engines, and the function that builds an engine by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybridrl.config.schema import RolloutConfig
from hybridrl.hybrid_engine.engine import WeightTarget
from hybridrl.models.family import Family
from hybridrl.models.sources import TrainingShard
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.engine import RolloutEngine
from hybridrl.rollout.registry import ENGINES, load_symbol


@dataclass(frozen=True)
class EngineInputs:
    """Inputs for one rank's part of an engine. Each engine uses some of them."""

    rollout: RolloutConfig
    hf_config: Mapping[str, Any]
    family: Family
    dtype: torch.dtype
    layout: RolloutLayout
    rank: int
    device: torch.device
    max_tokens: int  # maximum number of tokens in a prompt and its response
    reserved_bytes: int  # device bytes that the trainer will add during rollout
    timeout_s: float  # time limit of the engine's collectives
    shard: TrainingShard | None  # the trainer's parameters, if the engine may use them
    records_experts: bool = False
    adapters: tuple[str, ...] = ()  # names of LoRA adapters in addition to the policy's
    directory: Path | None = None  # directory with the model's tokenizer and processor files
    is_exact: bool = False  # whether to compute the trainer's bits (`numerics.match`)

    @property
    def dtype_name(self) -> str:
        """The dtype's name in libraries other than torch, e.g. "float32"."""
        return str(self.dtype).removeprefix("torch.")


class EngineAdapter(RolloutEngine, WeightTarget, Protocol):
    """A registered engine: it generates responses, and the hybrid engine writes its weights."""


@runtime_checkable
class ComputingEngine(EngineAdapter, Protocol):
    """An engine with the trait `computes`: its tokens come from its weights."""

    @property
    def model(self) -> torch.nn.Module:
        """This rank's model, for inspection only."""


@runtime_checkable
class SharingEngine(EngineAdapter, Protocol):
    """An engine with the trait `shares_memory`: its parameters may be the trainer's own tensors."""

    shared: frozenset[str]
    """Names of the engine's tensors that use the trainer's memory."""


@runtime_checkable
class AdapterEngine(EngineAdapter, Protocol):
    """An engine with the trait `takes_adapters` whose model has LoRA adapters. Each request names
    its adapter.

    Weight transfers write the policy's adapter, which is part of `tensors`. The others are written
    by common/other_adapters.py, between `begin_update` and `finish_update`.
    """

    @property
    def adapters(self) -> Sequence[str]:
        """Names of all adapters, the policy's first."""

    def adapter_tensors(self, name: str) -> Mapping[str, Tensor]:
        """Returns an adapter's tensors by their names in `layout`; KeyError if unknown."""


def build(inputs: EngineInputs) -> EngineAdapter:
    """Builds this rank's part of the engine that `rollout.engine` names."""
    path = ENGINES[inputs.rollout.engine].builder
    builder: Callable[[EngineInputs], EngineAdapter] = load_symbol(path)
    return builder(inputs)
