"""Training and rollout as phases that take turns on the same devices.

`PhaseSwitch` keeps the order, so that nobody trains while the engine's weights are being written,
or generates with weights that are not the newest. What frees memory between phases is behind
interfaces: the engine's (target.py), and here those of what the trainer holds.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol


class Phase(Enum):
    """What the devices are used for."""

    TRAIN = "train"
    ROLLOUT = "rollout"


class PhaseError(RuntimeError):
    """Something was asked for that the current phase does not offer."""


class Restorable(Protocol):
    """Device memory that is needed only while training; the calls alternate."""

    def release(self) -> None:
        """Frees it; what is worth keeping is moved away first."""
        ...

    def restore(self) -> None:
        """Allocates all of it again; what was moved away may still be on its way back."""
        ...


class TrainingMemory(Restorable, Protocol):
    """What the trainer holds only while it trains."""

    @property
    def may_stay(self) -> bool:
        """Whether it may stay during rollout: a full update has run since it was last released, and
        no knob asks for it to be moved away.
        """
        ...

    @property
    def growth_bytes(self) -> int:
        """Bytes that full micro-batches would take beyond the peak since it was last released."""
        ...


class TrainingWeights(Restorable, Protocol):
    """The trainer's weights, which the engine is written from.

    `release` frees them, or starts to gather them from the ranks that have updated a part each.
    """

    @property
    def is_freed(self) -> bool:
        """Whether `release` frees them; else it starts a gather that may go on beside rollout."""
        ...


class PhaseSwitch:
    """The current phase, and the only way to change it."""

    def __init__(self) -> None:
        self._phase = Phase.TRAIN

    @property
    def phase(self) -> Phase:
        """The current phase; training at first."""
        return self._phase

    def enter(self, phase: Phase) -> None:
        """Goes to `phase`.

        Raises:
            PhaseError: it is the current one already.
        """
        if phase is self._phase:
            raise PhaseError(f"cannot enter phase {phase.value}: it is {self._phase.value} already")
        self._phase = phase

    def require(self, phase: Phase, action: str) -> None:
        """Raises PhaseError unless the current phase is the one that `action` needs."""
        if self._phase is not phase:
            raise PhaseError(f"{action} needs phase {phase.value}, but it is {self._phase.value}")
