"""Training and rollout as phases that take turns on the same devices.

`PhaseSwitch` enforces their order: no training while the engine's weights are being written, and no
generation with outdated weights.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class Phase(Enum):
    """Current use of the devices."""

    TRAIN = "train"
    ROLLOUT = "rollout"


class PhaseError(RuntimeError):
    """An operation that the current phase does not allow."""


class Restorable(Protocol):
    """Device memory that only training needs; `release` and `restore` are called alternately."""

    def release(self) -> None:
        """Frees the memory, after backing up content that must survive."""

    def restore(self) -> None:
        """Allocates the memory again. Backed-up content may be copied back asynchronously."""


class TrainingMemory(Restorable, Protocol):
    """Memory that the trainer needs only while it trains."""

    @property
    def may_stay(self) -> bool:
        """Whether the memory may stay allocated during rollout: a full update has run with it."""

    @property
    def growth_bytes(self) -> int:
        """Bytes by which full micro-batches would exceed the peak since the last release."""


class TrainingWeights(Restorable, Protocol):
    """The trainer's weights, which are copied to the engine.

    `release` frees them, or starts to all-gather the shards that the ranks have updated.
    """

    @property
    def is_freed(self) -> bool:
        """Whether `release` frees the weights instead of starting an all-gather."""


class PhaseSwitch:
    """Stores the current phase and rejects invalid changes."""

    def __init__(self) -> None:
        self.phase = Phase.TRAIN

    def enter(self, phase: Phase) -> None:
        """Changes the phase; raises PhaseError if it is the current phase already."""
        if phase is self.phase:
            raise PhaseError(f"cannot enter phase {phase.value}, because it is the current phase")
        self.phase = phase

    def require(self, phase: Phase, action: str) -> None:
        if self.phase is not phase:
            raise PhaseError(
                f"{action} needs phase {phase.value}, but the current phase is {self.phase.value}"
            )
