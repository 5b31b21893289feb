"""A placeholder for ranks without an engine: it generates nothing and receives no weights.

With it, the training loop, the sampler and the hybrid engine run the same code on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hybridrl.models.weights import NOTHING, RankLayout
from hybridrl.rollout.common.queue import QueuedEngine
from hybridrl.rollout.engine import Request


class AbsentEngine(QueuedEngine):
    """Implements `RolloutEngine` and `WeightTarget` for a rank without an engine.

    `finish_update` records the version, as other ranks' engines do.
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
