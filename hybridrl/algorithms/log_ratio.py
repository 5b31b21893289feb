"""Ratios of probabilities, bounded, and estimates of the KL from them. Pure functions.

Everything is predictor-aligned and per position, on the device of its arguments, and waits for
none.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8; in float32 exp(89) is infinite
MAX_K3 = 10.0  # nats a token


def bounded_log_ratio(log_ratio: Tensor) -> Tensor:
    """Returns the logarithm of a ratio of probabilities, at least -20 and at most 20; beyond these
    bounds, those of verl and OpenRLHF, it has no gradient.

    Only what this function returns is exponentiated. An infinite ratio would make the loss
    infinite, or, where clipping multiplies its gradient by 0, the gradient NaN, and the whole
    optimizer step would be skipped because of one token. A NaN stays NaN.
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """Returns the ratio of probabilities with this logarithm, bounded as `bounded_log_ratio`."""
    return bounded_log_ratio(log_ratio).exp()


def kl_estimate(logp_S: Tensor, other_logp_S: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimates KL(p, q) from tokens sampled from p (Schulman 2020,
    joschu.net/blog/kl-approx.html).

    With d = log q - log p: k1 = -d (unbiased), k2 = d^2 / 2 (biased, positive), k3 = exp(d) - 1 -
    d (unbiased, positive; eq. 4 of GRPO, arXiv 2402.03300). As a loss differentiated through p,
    k1 has a gradient of mean zero: it belongs into a reward. k2 has the gradient of the KL, k3
    that of the KL(q, p) (Liu et al. 2025, arXiv 2510.01555); multiplied by the ratio p /
    (p without a gradient), k1 and k3 have that of the KL too (DeepSeek-V3.2, arXiv 2512.02556,
    sec. 3.1).

    k3 is at most 10 nats a token and has no gradient beyond, as in verl: otherwise a single token
    would outweigh all others long before its exponential reaches its bound. k1 and k2 have no
    bound.

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
