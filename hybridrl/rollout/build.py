"""What every rollout engine is built from, and the one place that builds it by its name.

Owns the inputs that all adapters get. An adapter's `build` takes what it needs of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from hybridrl.config.schema import RolloutConfig
from hybridrl.hybrid_engine.target import WeightTarget
from hybridrl.models.family import Family
from hybridrl.models.sources import TrainingShard
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.engine import RolloutEngine
from hybridrl.rollout.registry import ENGINES, named


@dataclass(frozen=True)
class EngineInputs:
    """What one rank's part of an engine is built from.

    `reserved_bytes` of the device are what the trainer will hold during rollout beyond what it
    holds when the engine starts. `shard` is the trainer's parameters on this rank, which stay where
    they are; None: the engine has its own memory. `timeout_s` bounds collectives inside the engine.
    """

    rollout: RolloutConfig
    hf_config: Mapping[str, Any]
    family: Family
    dtype: torch.dtype
    layout: RolloutLayout
    rank: int
    device: torch.device
    max_tokens: int
    reserved_bytes: int
    timeout_s: float
    shard: TrainingShard | None
    records_experts: bool = False

    @property
    def dtype_name(self) -> str:
        """The dtype as libraries other than torch call it, e.g. "float32"."""
        return str(self.dtype).removeprefix("torch.")


class EngineAdapter(RolloutEngine, WeightTarget, Protocol):
    """An engine of the table: it generates, and the hybrid engine writes its weights."""


@runtime_checkable
class ComputingEngine(EngineAdapter, Protocol):
    """An engine whose tokens come from its weights, the trait `computes`."""

    @property
    def model(self) -> torch.nn.Module:
        """This rank's module, for those who look into it; not to be changed."""
        ...


@runtime_checkable
class SharingEngine(EngineAdapter, Protocol):
    """An engine whose parameters may be the trainer's, the trait `shares_memory`."""

    shared: frozenset[str]
    """Names of its tensors that are the trainer's memory."""


def build(inputs: EngineInputs) -> EngineAdapter:
    """Builds this rank's part of the engine that `rollout.engine` names."""
    builder: Callable[[EngineInputs], EngineAdapter] = named(ENGINES[inputs.rollout.engine].builder)
    return builder(inputs)
