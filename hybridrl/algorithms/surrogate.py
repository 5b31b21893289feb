"""Per-token objectives of policy and critic. Pure functions.

Everything is predictor-aligned and per position, on the device of its arguments, and waits for
none. An objective is to be maximised; with it comes where clipping changed it.
"""

from __future__ import annotations

from typing import Literal

import torch
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


def clipped_surrogate(
    log_ratio_S: Tensor,
    advantages_S: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The clipped objective of PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

    min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logp - old_logp); equal bounds
    are the paper's, a higher upper one is DAPO's (Yu et al. 2025, arXiv 2503.14476, eq. 10). With
    the ratio of a whole response it is GSPO's (Zheng et al. 2025, arXiv 2507.18071, eq. 5).

    Args:
        dual_clip: c > 1 keeps the objective from falling below c A where A < 0, however large the
            ratio (Ye et al. 2020, arXiv 1912.09729).

    Returns:
        The objective, and where it is a clipped term, which has no gradient.
    """
    ratio_S = importance_ratio(log_ratio_S)
    plain_S = ratio_S * advantages_S
    clipped_S = ratio_S.clamp(1 - clip_low, 1 + clip_high) * advantages_S
    objective_S, is_clipped_S = torch.minimum(plain_S, clipped_S), clipped_S < plain_S
    if dual_clip is None:
        return objective_S, is_clipped_S
    floor_S = dual_clip * advantages_S
    is_below_S = (advantages_S < 0) & (objective_S < floor_S)
    return torch.where(is_below_S, floor_S, objective_S), is_clipped_S | is_below_S


def clipped_log_ratio(
    log_ratio_S: Tensor, advantages_S: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Bounds the logarithm of the ratio on the side to which the advantage pushes it.

    GMPO's clipping of a token, before the geometric mean (Zhao et al. 2025, arXiv 2507.20673):
    at most clip_high where A > 0, at least -clip_low where A < 0.
    """
    bounded_S = torch.where(
        advantages_S > 0, log_ratio_S.clamp(max=clip_high), log_ratio_S.clamp(min=-clip_low)
    )
    return bounded_S, bounded_S != log_ratio_S


def weighted_logp(
    logp_S: Tensor, log_ratio_S: Tensor, advantages_S: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The objective of CISPO (MiniMax 2025, arXiv 2506.13585, eq. 4-5).

    sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp, sg without a gradient: a bounded weight, and
    a gradient at every token.
    """
    ratio_S = importance_ratio(log_ratio_S.detach())
    weight_S = ratio_S.clamp(1 - clip_low, 1 + clip_high)
    return weight_S * advantages_S * logp_S, weight_S != ratio_S


def soft_gated(
    log_ratio_S: Tensor, advantages_S: Tensor, tau_positive: float, tau_negative: float
) -> Tensor:
    """The objective of SAPO (Gao et al. 2025, arXiv 2511.20347, eq. 5-6).

    4 / tau sigmoid(tau (r - 1)) A, with a temperature for each sign of A: the gradient at r = 1 is
    that of r A, and fades on both sides.
    """
    tau_S = torch.full_like(log_ratio_S, tau_negative).masked_fill(advantages_S > 0, tau_positive)
    gate_S = torch.sigmoid(tau_S * (importance_ratio(log_ratio_S) - 1))
    return 4 / tau_S * gate_S * advantages_S


def clipped_value_loss(
    values_S: Tensor, old_values_S: Tensor, returns_S: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Squared error of the critic, no better for moving a value further than `clip` from its old
    one.

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2: the value loss of the PPO
    authors' code (openai/baselines, ppo2; Huang et al. 2022, "The 37 implementation details of
    PPO", no. 9).

    Returns:
        The loss, and where the clipped term is the larger one, which has no gradient.
    """
    near_S = old_values_S + (values_S - old_values_S).clamp(-clip, clip)
    plain_S, clipped_S = (values_S - returns_S).square(), (near_S - returns_S).square()
    return torch.maximum(plain_S, clipped_S) / 2, clipped_S > plain_S


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
