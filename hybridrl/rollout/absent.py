"""What stands where a rank has no engine: it generates nothing and receives no weights.

So the loop, the sampler and the hybrid engine run the same code on every rank of a placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hybridrl.models.weights import NOTHING, RankLayout
from hybridrl.rollout.common.stops import TokenTexts
from hybridrl.rollout.engine import Completion, Holding, Request


class AbsentEngine:
    """Implements `RolloutEngine` and `WeightTarget` for a rank without an engine."""

    def __init__(self) -> None:
        self._version = -1
        self.token_texts: TokenTexts | None = None

    @property
    def version(self) -> int:
        """The version that the engines of other ranks have."""
        return self._version

    @property
    def has_unfinished(self) -> bool:
        """Never."""
        return False

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes no requests; raises ValueError if there are some."""
        if requests:
            raise ValueError(f"{len(requests)} requests for a rank that has no engine")

    def step(self) -> None:
        """Does nothing."""

    def collect(self) -> list[Completion]:
        """Returns nothing."""
        return []

    def pending(self) -> list[Request]:
        """Returns nothing."""
        return []

    def clear(self) -> None:
        """Does nothing."""

    def memory(self) -> Mapping[str, Holding]:
        """Returns nothing."""
        return {}

    def close(self) -> None:
        """Does nothing."""

    def layout(self) -> RankLayout:
        """Returns the layout of a rank that has no part of a model."""
        return NOTHING

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns nothing."""
        return {}

    def begin_update(self) -> None:
        """Does nothing."""

    def sleep(self, keeps_memory: bool = False) -> None:
        """Does nothing."""

    def finish_update(self, version: int) -> None:
        """Takes in the version that the engines have."""
        self._version = version
