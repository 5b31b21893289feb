"""What the hybrid engine asks of the thing whose weights it writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

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

    def sleep(self) -> None:
        """Gives rollout memory back for training; generates again only after the next update."""
        ...

    def finish_update(self, version: int) -> None:
        """Declares all parameters to be of weight version `version` and drops what was cached."""
        ...
