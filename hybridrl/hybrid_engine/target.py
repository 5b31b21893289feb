"""Interface of an engine whose weights the hybrid engine writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from hybridrl.models.weights import RankLayout


class WeightTarget(Protocol):
    """An inference engine's live parameters on this rank, writable in place."""

    def layout(self) -> RankLayout:
        """Returns which parts of the HF checkpoint this rank's parameters contain."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the engine's live parameters by their names in the layout, to write to."""

    def begin_update(self) -> None:
        """Makes the parameters writable; until `finish_update` the engine does not generate."""

    def sleep(self, keeps_memory: bool = False) -> None:
        """Stops generation until the next update has finished.

        With `keeps_memory`, weights and caches stay allocated instead of being freed for training.
        """

    def finish_update(self, version: int) -> None:
        """Declares a new version of all parameters, and clears caches that depend on them."""


@runtime_checkable
class ForgettingTarget(WeightTarget, Protocol):
    """A target whose parameters can lose their content while it sleeps."""

    def forgets_weights(self, keeps_memory: bool) -> bool:
        """Returns whether `sleep(keeps_memory)` loses parameters; constant during a run."""


@runtime_checkable
class CopyingTarget(WeightTarget, Protocol):
    """A target that computes with copies of some parameters; `finish_update` updates the copies."""

    def stale_copy(self) -> str | None:
        """Returns the name of the first copy that differs from its parameter, or None."""


def stale_copy_of(target: WeightTarget) -> str | None:
    return target.stale_copy() if isinstance(target, CopyingTarget) else None


def forgets(target: WeightTarget) -> tuple[bool, bool]:
    """Returns whether a target loses its weights in a sleep that frees, or that keeps, memory."""
    if not isinstance(target, ForgettingTarget):
        return False, False
    return target.forgets_weights(keeps_memory=False), target.forgets_weights(keeps_memory=True)
