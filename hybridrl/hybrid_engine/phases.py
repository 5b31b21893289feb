"""Training and rollout as phases that take turns on the same devices.

Each edge says what it frees and what it maps. Here, the form for hosts where everything fits at
once, an edge moves nothing: it keeps the order, so that nobody trains while the engine's weights
are being written, or generates with weights that are not the newest.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """What the devices are used for."""

    TRAIN = "train"
    ROLLOUT = "rollout"


class PhaseError(RuntimeError):
    """Something was asked for that the current phase does not offer."""


@dataclass(frozen=True)
class Edge:
    """A change of phase: what gives its memory back, and what needs memory afterwards."""

    frees: tuple[str, ...]
    maps: tuple[str, ...]


EDGES: dict[tuple[Phase, Phase], Edge] = {
    (Phase.TRAIN, Phase.ROLLOUT): Edge(
        frees=("activations", "gradients"), maps=("engine weights", "KV cache")
    ),
    (Phase.ROLLOUT, Phase.TRAIN): Edge(frees=("KV cache",), maps=("gradients", "activations")),
}


class PhaseSwitch:
    """The current phase, and the only way to change it."""

    def __init__(self) -> None:
        self._phase = Phase.TRAIN

    @property
    def phase(self) -> Phase:
        """The current phase; training at first."""
        return self._phase

    def enter(self, phase: Phase) -> Edge:
        """Goes to `phase` and returns the edge that was taken.

        Raises:
            PhaseError: no edge leads there from the current phase.
        """
        edge = EDGES.get((self._phase, phase))
        if edge is None:
            raise PhaseError(f"cannot enter phase {phase.value}: it is {self._phase.value} already")
        self._phase = phase
        return edge

    def require(self, phase: Phase, action: str) -> None:
        """Raises PhaseError unless the current phase is the one that `action` needs."""
        if self._phase is not phase:
            raise PhaseError(f"{action} needs phase {phase.value}, but it is {self._phase.value}")
