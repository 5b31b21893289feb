"""Names and data types of the states that optimizers have of a parameter.

Adam's states are fp32 masters and fp32 moments. A PackedAdam has bf16 moments, and remainders in
place of masters. A MatrixOptimizer has momentum of matrices, and Adam's moments of others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

# Megatron's names for the fp32 weight and Adam's moments.
MASTER, MOMENTS = "param", ("exp_avg", "exp_avg_sq")
STATES = (MASTER, *MOMENTS)
MOMENTUM = "momentum_buffer"  # Muon's state of a matrix
REMAINDER = "remainder"  # low 16 bits of the fp32 weight (fp32_remainders.py)

Kinds = Mapping[str, torch.dtype]
"""Names and data types of a parameter's states."""


@runtime_checkable
class PackedAdam(Protocol):
    """An Adam with bf16 moments and remainders, possibly in host memory (piecewise_adam.py)."""

    on_host: bool
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Sets a state of a parameter's shard; Megatron calls this."""
        ...


@runtime_checkable
class MatrixOptimizer(Protocol):
    """An optimizer with momentum of some parameters, and Adam's moments of others (muon.py)."""

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    def state_names(self, parameter: Tensor) -> tuple[str, ...]: ...


def kinds_of(optimizer: Any, parameter: Tensor) -> Kinds:
    if isinstance(optimizer.optimizer, MatrixOptimizer):
        names = optimizer.optimizer.state_names(parameter)
        return dict.fromkeys((MASTER, *names), torch.float32)
    if not isinstance(optimizer.optimizer, PackedAdam):
        return dict.fromkeys(STATES, torch.float32)
    found = dict.fromkeys(MOMENTS, torch.bfloat16)
    return found if parameter.dtype == torch.float32 else {**found, REMAINDER: torch.int16}


def kinds_to_read(optimizer: Any, parameter: Tensor, names: Collection[str]) -> Kinds:
    """Returns the states to read, given the names of a parameter's states in a checkpoint."""
    own, others = kinds_of(optimizer, parameter), {MASTER: torch.float32, REMAINDER: torch.int16}
    return {name: own.get(name) or others[name] for name in names}
