"""A placeholder for ranks without an engine, so that the same code runs on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hybridrl.models.weights import NOTHING, RankLayout
from hybridrl.rollout.engine import QueuedEngine, Request


class AbsentEngine(QueuedEngine):
    """Generates nothing and receives no weights; records versions as other ranks' engines do."""

    def submit(self, requests: Sequence[Request]) -> None:
        if requests:
            raise ValueError(f"{len(requests)} requests for a rank that has no engine")

    def step(self) -> None:
        """Does nothing."""

    def layout(self) -> RankLayout:
        return NOTHING

    def tensors(self) -> Mapping[str, Tensor]:
        return {}
