"""Inputs of rollout engines, and the function that builds an engine by its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from hybridrl.config.schema import RolloutConfig
from hybridrl.hybrid_engine.target import WeightTarget
from hybridrl.models.family import Family
from hybridrl.models.sources import TrainingShard
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.engine import RolloutEngine
from hybridrl.rollout.registry import ENGINES, load_symbol


@dataclass(frozen=True)
class EngineInputs:
    """Inputs for one rank's part of an engine, of which each adapter uses some.

    Args:
        max_tokens: Maximum number of tokens in a prompt and its response.
        reserved_bytes: Device memory that the trainer will occupy during rollout in addition to
            what it occupies when the engine starts.
        timeout_s: Time limit of the engine's collectives.
        shard: The trainer's parameters on this rank, whose addresses must not change; None if the
            engine must use its own memory.
        adapters: Names of LoRA adapters that the engine holds in addition to the policy's.
        directory: Directory with the model's tokenizer and processor files.
        is_exact: Whether the engine computes the same bits as the trainer (`numerics.match`).
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
    adapters: tuple[str, ...] = ()
    directory: Path | None = None
    is_exact: bool = False

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
    """An engine with the trait `takes_adapters`, of a family with adapters. Each request names its
    adapter.

    Weight transfers write the policy's adapter, which is part of `tensors`. The others are written
    by common/other_adapters.py, between `begin_update` and `finish_update`.
    """

    @property
    def adapters(self) -> Sequence[str]:
        """Names of all adapters, the policy's first."""

    def adapter_tensors(self, name: str) -> Mapping[str, Tensor]:
        """Returns an adapter's memory by the policy's names in `layout`; KeyError if unknown."""


def build(inputs: EngineInputs) -> EngineAdapter:
    """Builds this rank's part of the engine that `rollout.engine` names."""
    path = ENGINES[inputs.rollout.engine].builder
    builder: Callable[[EngineInputs], EngineAdapter] = load_symbol(path)
    return builder(inputs)
