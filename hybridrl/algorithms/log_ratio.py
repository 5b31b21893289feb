"""Bounded ratios of probabilities, and estimates of the KL from log-probabilities.

Pure functions with one value per position. They run on the device of their arguments and do not
synchronise with the host.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8; in float32 exp(89) is infinite
MAX_K3 = 10.0  # nats per token


def bounded_log_ratio(log_ratio: Tensor) -> Tensor:
    """Returns the log-ratio clamped to [-20, 20], as in verl and OpenRLHF, with gradient 0 outside.

    An infinite ratio would make the loss infinite, or make its gradient NaN where clipping
    multiplies the ratio by 0, and the whole optimizer step would be skipped. A NaN stays NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Returns exp(log_ratio), bounded as in `bounded_log_ratio`."""
    return bounded_log_ratio(log_ratio).exp()


def kl_estimate(logp_S: Tensor, other_logp_S: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimates KL(p, q) at tokens sampled from p (Schulman 2020, joschu.net/blog/kl-approx.html).

    With d = log q - log p:

        k1: -d, unbiased. As a loss its expected gradient is zero, so it is only useful in a reward.
        k2: d^2 / 2, biased and never negative. As a loss its expected gradient is the gradient of
            KL(p, q).
        k3: exp(d) - 1 - d, unbiased and never negative (GRPO, arXiv 2402.03300, eq. 4). As a loss
            its expected gradient is the gradient of KL(q, p).

    Liu et al. 2025, arXiv 2510.01555, derive these gradients. Multiplied by the ratio p / sg(p),
    where sg stops the gradient, k1 and k3 have the gradient of KL(p, q) too (DeepSeek-V3.2, arXiv
    2512.02556, sec. 3.1).

    As in verl, k3 is capped at 10 nats per token, above which it has no gradient; otherwise a
    single token could outweigh all others. k1 and k2 are not capped.

    Args:
        logp_S: log p of the sampled tokens.
        other_logp_S: log q of the same tokens.
    """
    d_S = other_logp_S - logp_S
    if estimator == "k1":
        return -d_S
    if estimator == "k2":
        return d_S.square() / 2
    bounded_S = bounded_log_ratio(d_S)
    return (bounded_S.exp() - 1 - bounded_S).clamp(max=MAX_K3)
