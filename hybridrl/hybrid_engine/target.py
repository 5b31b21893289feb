"""What the hybrid engine asks of the thing whose weights it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from hybridrl.models.weights import RankLayout


class WeightTarget(Protocol):
    """An inference engine's live parameters on this rank, writable in place."""

    def layout(self) -> RankLayout:
        """Returns what of the HF checkpoint each of this rank's parameters holds."""
        ...

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the live parameters by the layout's names; writing them changes the engine."""
        ...

    def begin_update(self) -> None:
        """Makes the parameters writable; until `finish_update` the engine does not generate."""
        ...

    def sleep(self, keeps_memory: bool = False) -> None:
        """Stops generation until the next update has finished.

        Args:
            keeps_memory: else weights and caches give their memory back for training.
        """
        ...

    def finish_update(self, version: int) -> None:
        """Declares all parameters to be of weight version `version` and drops what was cached."""
        ...


@runtime_checkable
class ForgettingTarget(WeightTarget, Protocol):
    """A target whose parameters can lose their content while it sleeps."""

    def forgets_weights(self, keeps_memory: bool) -> bool:
        """Returns whether they do after `sleep(keeps_memory)`. It does not change during a run."""
        ...


@runtime_checkable
class CopyingTarget(WeightTarget, Protocol):
    """A target that computes with copies of parameters, which `finish_update` makes again."""

    def stale_copy(self) -> str | None:
        """Returns the name of the first copy that is not of the present weights; None: all are."""
        ...


def stale_copy_of(target: WeightTarget) -> str | None:
    """Returns the same of any target."""
    return target.stale_copy() if isinstance(target, CopyingTarget) else None


def forgets(target: WeightTarget) -> tuple[bool, bool]:
    """Returns whether a target forgets its weights in a sleep without memory, and in one with."""
    if not isinstance(target, ForgettingTarget):
        return False, False
    return target.forgets_weights(keeps_memory=False), target.forgets_weights(keeps_memory=True)
