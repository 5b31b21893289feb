"""Compares the engine's log-probabilities with the trainer's: metrics, bounds and a warning.

Contains the only table of bounds for these differences. Computing the metrics is collective if each
rank holds only some samples. debug/diagnose.py finds the cause of a mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hybridrl.algorithms.advantage import response_values
from hybridrl.algorithms.base import Algorithm
from hybridrl.algorithms.correction import off_policy_metrics
from hybridrl.algorithms.log_ratio import bounded_log_ratio
from hybridrl.algorithms.over_tokens import OverTokens
from hybridrl.algorithms.policy_gradient import PolicyGradient
from hybridrl.config.schema import Config
from hybridrl.contracts.batch import RolloutBatch

MEAN = "mismatch/logprob_diff_mean"
MAX = "mismatch/logprob_diff_max"
LARGE_DIFFERENCE = 0.1  # nats; half of the usual clip range of 0.2
WARN_EVERY_STEPS = 50


@dataclass(frozen=True)
class Bounds:
    """Largest acceptable differences between two implementations of the same model.

    Args:
        refuse: Mean absolute difference of log-probabilities, in nats, above which a run does not
            start.
        warn: Mean absolute difference in a step, in nats, above which a warning is printed.
        residual: Relative RMS difference of the residual stream, per token.
    """

    refuse: float
    warn: float
    residual: float


# float32: only the order of summation differs. Measured differences are below 1e-5 nats, and below
# 5e-6 in the residual stream. bfloat16: the two implementations round differently in every layer.
# Random weights gave 0.01 nats with 24 layers and 0.05 with 28 wider ones; wrong positions, heads
# or norms give about 1. The warning threshold, 0.02, is a tenth of the usual clip range of 0.2:
# above it, rounding alone changes the importance ratios noticeably. The residual stream may differ
# by 8 units in bfloat16's last place (measured with random weights: up to 0.02 after 24 layers,
# each of which added less than 0.005).
BOUNDS = {
    torch.float32: Bounds(refuse=1e-3, warn=1e-3, residual=1e-5),
    torch.bfloat16: Bounds(refuse=0.2, warn=0.02, residual=8 * 2.0**-8),
}


# A side that computes in FP8 rounds weights or the inputs of matrix products to 4 significant bits,
# the other side to 8. Two small random models gave 0.13 to 0.24 nats from weights alone; a trainer
# with train.fp8=hybrid and random 7B weights gave 0.56.
FP8_BOUNDS = Bounds(refuse=0.8, warn=0.1, residual=0.25)


# With numerics.match=exact, any difference is an error.
EXACT_BOUNDS = Bounds(refuse=0.0, warn=0.0, residual=0.0)


def bounds_of(dtype: torch.dtype, config: Config) -> Bounds:
    if config.numerics.is_exact:
        return EXACT_BOUNDS
    return FP8_BOUNDS if uses_fp8(config) else BOUNDS[dtype]


def uses_fp8(config: Config) -> bool:
    return config.rollout.uses_fp8 or config.train.fp8 != "none"


def mismatch_metrics(batch: RolloutBatch, logp_T: torch.Tensor) -> dict[str, float]:
    """Returns the mismatch metrics of a step, computed over all sampled tokens, each counted once.

    `mismatch/kl` estimates KL(engine, trainer) with k3 (Schulman 2020,
    joschu.net/blog/kl-approx.html): the mean of exp(d) - 1 - d, where d is the trainer's minus the
    engine's log-probability, capped at 20 inside the exponential. `mismatch/share_above_0.1` is the
    share of tokens with |d| above LARGE_DIFFERENCE. `mismatch/correlation` is Pearson's
    correlation, or NaN if the log-probabilities of the engine or the trainer are constant.

    Args:
        logp_T: The trainer's log-probabilities at the start of the step, shape (T,) like the
            batch's columns.
    """
    over = OverTokens(batch)
    engine_R = response_values(batch.behaviour_logp_T, batch).double()
    trainer_R = response_values(logp_T, batch).double()
    d_R = trainer_R - engine_R
    k3_R = bounded_log_ratio(d_R).expm1() - d_R
    is_large_R = (d_R.abs() > LARGE_DIFFERENCE).double()
    gap, k3, large, *means = over.means(d_R.abs(), k3_R, is_large_R, engine_R, trainer_R).tolist()
    sides = engine_R, -engine_R, trainer_R, -trainer_R
    largest, *extremes = over.largest(d_R.abs(), *sides).amax(0).tolist()
    is_constant = extremes[0] == -extremes[1] or extremes[2] == -extremes[3]
    e_R, t_R = engine_R - means[0], trainer_R - means[1]
    ee, tt, et = over.totals(e_R.square(), t_R.square(), e_R * t_R)
    return {
        MEAN: gap,
        MAX: largest,
        "mismatch/share_above_0.1": large,
        "mismatch/kl": k3,
        "mismatch/correlation": float("nan") if is_constant else float(et / (ee * tt).sqrt()),
    }


def behaviour_metrics(
    batch: RolloutBatch, logp_T: torch.Tensor, algorithm: Algorithm
) -> dict[str, float]:
    correction = algorithm.correction if isinstance(algorithm, PolicyGradient) else None
    return mismatch_metrics(batch, logp_T) | off_policy_metrics(batch, logp_T, correction)


class MismatchWarning:
    """Warns if the mean difference in a step exceeds the bound, at most once per 50 steps."""

    def __init__(self, dtype: torch.dtype, config: Config) -> None:
        self._bound = bounds_of(dtype, config).warn
        self._dtype = str(dtype).removeprefix("torch.")
        if config.numerics.is_exact:
            self._dtype += " with numerics.match=exact"
        elif uses_fp8(config):
            sides = [
                ("training", config.train.fp8 != "none"),
                ("rollouts", config.rollout.uses_fp8),
            ]
            self._dtype += " with FP8 " + " and ".join(side for side, is_on in sides if is_on)
        self._last_step: int | None = None

    def text(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Returns the warning to print after a step, or None."""
        mean = metrics.get(MEAN)
        # A non-finite mean occurs only in a skipped step, which prints its own message.
        if mean is None or not math.isfinite(mean) or mean <= self._bound:
            return None
        if metrics.get("lag/max", 0) > 0:  # samples from an older policy are expected to differ
            return None
        if self._last_step is not None and step - self._last_step < WARN_EVERY_STEPS:
            return None
        self._last_step = step
        return (
            f"warning: step {step}: {MEAN} is {mean:.2g}, above {self._bound:g} for {self._dtype}: "
            "the engine and the trainer compute different log-probabilities for the same tokens. "
            "To find the cause, run: hybridrl check --mismatch CONFIG"
        )
