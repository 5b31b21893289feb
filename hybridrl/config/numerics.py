"""The section `numerics`: how closely engine and trainer agree. No torch."""

from __future__ import annotations

from typing import Literal

from hybridrl.config.section import Section


class NumericsConfig(Section):
    """How closely the engine's log-probabilities agree with the trainer's."""

    match: Literal["close", "exact"] = "close"
    """Agreement of the engine's log-probabilities with the trainer's. With 'exact', both compute the same bits for the same tokens: products, norms, attention and logits use operations that do not depend on the batch. The sampler's log-probabilities then serve as old ones, so that no pass recomputes them. The default, 'close', uses each side's fastest kernels, which round differently; see docs/concepts/agreement.md."""

    @property
    def is_exact(self) -> bool:
        return self.match == "exact"
