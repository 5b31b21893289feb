"""Training and rollout as phases that take turns on the same devices.

`PhaseSwitch` keeps the order: nobody trains while the engine's weights are being written, and
nobody generates with outdated weights. The engine frees memory through target.py, the trainer
through the interfaces here.
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
    """Device memory that only training needs; calls to its methods alternate."""

    def release(self) -> None:
        """Frees the memory, after moving content that must survive elsewhere."""
        ...

    def restore(self) -> None:
        """Allocates the memory again; moved content may still be on its way back."""
        ...


class TrainingMemory(Restorable, Protocol):
    """Memory that the trainer needs only while it trains."""

    @property
    def may_stay(self) -> bool:
        """Whether the memory may stay during rollout.

        True if a full update has run since it was last released and no knob offloads it.
        """
        ...

    @property
    def growth_bytes(self) -> int:
        """Bytes that full micro-batches would take beyond the peak since the last release."""
        ...


class TrainingWeights(Restorable, Protocol):
    """The trainer's weights, from which the engine is written.

    `release` frees them, or starts to gather the parts that each rank has updated.
    """

    @property
    def is_freed(self) -> bool:
        """Whether `release` frees the weights; otherwise it starts a gather that may overlap
        rollout.
        """
        ...


class PhaseSwitch:
    """Holds the current phase and checks changes of it."""

    def __init__(self) -> None:
        self._phase = Phase.TRAIN

    @property
    def phase(self) -> Phase:
        """The current phase; training at first."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Changes the phase.

        Raises:
            PhaseError: `phase` is already the current one.
        """
        if phase is self._phase:
            raise PhaseError(f"cannot enter phase {phase.value}: it is {self._phase.value} already")
        self._phase = phase

    def require(self, phase: Phase, action: str) -> None:
        """Raises PhaseError unless `phase` is the current one."""
        if self._phase is not phase:
            raise PhaseError(f"{action} needs phase {phase.value}, but it is {self._phase.value}")
