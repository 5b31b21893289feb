"""The engine of a rank without an engine: it generates nothing and receives no weights.

The loop, the sampler and the hybrid engine so run the same code on every rank of a placement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hybridrl.models.weights import NOTHING, RankLayout
from hybridrl.rollout.common.queue import QueuedEngine
from hybridrl.rollout.engine import Request


class AbsentEngine(QueuedEngine):
    """Implements `RolloutEngine` and `WeightTarget` for a rank without an engine.

    `finish_update` keeps the version of the other ranks' engines.
    """

    def submit(self, requests: Sequence[Request]) -> None:
        if requests:
            raise ValueError(f"{len(requests)} requests for a rank that has no engine")

    def step(self) -> None:
        """Does nothing."""

    def layout(self) -> RankLayout:
        return NOTHING

    def tensors(self) -> Mapping[str, Tensor]:
        return {}
