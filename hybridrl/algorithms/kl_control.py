"""Adapts the coefficient of the KL penalty with a proportional controller. Pure functions."""

from __future__ import annotations

import math
from dataclasses import dataclass

MAX_ERROR = 0.2


@dataclass(frozen=True)
class AdaptiveKl:
    """Steers the KL to a target in nats per response (Ziegler et al. 2019, arXiv 1909.08593, sec.
    2.2).

    coefficient <- coefficient (1 + e n / horizon), with e = clip(KL / target - 1, -0.2, 0.2) and n
    samples in the step, as in the authors' code (openai/lm-human-preferences). The paper's K_beta
    is n / horizon. n is capped at the horizon, so that the coefficient stays positive.
    """

    target: float
    horizon: int

    def next(self, coefficient: float, kl: float, num_samples: int) -> float:
        """Returns the coefficient after a step; unchanged if `kl` is not finite (skipped step)."""
        if not math.isfinite(kl):
            return coefficient
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        return coefficient * (1 + error * min(num_samples / self.horizon, 1.0))
