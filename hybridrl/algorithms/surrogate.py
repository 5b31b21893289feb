"""Per-token objectives of policy and critic, and the policy loss that PPO and GRPO share. Pure
functions.

Everything is predictor-aligned and per position, on the device of its arguments, and waits for
none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hybridrl.algorithms.base import LossOutput
from hybridrl.batch import MicroBatch

KlEstimator = Literal["k1", "k2", "k3"]


def clipped_surrogate(
    logp_S: Tensor, old_logp_S: Tensor, advantages_S: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """The clipped objective of PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7), to be
    maximised.

    min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logp - old_logp); equal bounds
    are the paper's, a higher upper one is DAPO's (Yu et al. 2025, arXiv 2503.14476, eq. 10).

    Returns:
        The objective, and where the clipped term is the smaller one, which has no gradient.
    """
    ratio_S = (logp_S - old_logp_S).exp()
    plain_S = ratio_S * advantages_S
    clipped_S = ratio_S.clamp(1 - clip_low, 1 + clip_high) * advantages_S
    return torch.minimum(plain_S, clipped_S), clipped_S < plain_S


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
    k1 has a gradient of mean zero: it belongs into a reward.

    Args:
        logp_S: log p of the sampled tokens.
        other_logp_S: log q of the same tokens.
    """
    d_S = other_logp_S - logp_S
    if estimator == "k1":
        return -d_S
    if estimator == "k2":
        return d_S.square() / 2
    return d_S.exp() - 1 - d_S


@dataclass(frozen=True)
class PolicyLoss:
    """The loss that PPO and GRPO share, with its settings.

    -(clipped surrogate) + kl_coef KL(policy, reference) - entropy_coef entropy, summed over the
    response tokens and divided by the denominator; `kl_coef` 0 takes the KL out of the loss.
    """

    clip_low: float
    clip_high: float
    kl_coef: float
    kl_estimator: KlEstimator
    entropy_coef: float
    needed_by: str

    def __call__(
        self, logp_S: Tensor, entropy_S: Tensor, micro: MicroBatch, denominator: float
    ) -> LossOutput:
        """Returns the loss and its metrics; arguments as in `Algorithm.loss`."""
        mask_S = micro.loss_mask_S
        # Masked first, not last: what stands on other positions may overflow, and 0 x inf is NaN.
        # The columns are zero there already, so that every term below is.
        logp_S = logp_S.masked_fill(~mask_S, 0.0)
        entropy_S = entropy_S.masked_fill(~mask_S, 0.0)
        old_S = logp_S.detach() if micro.old_logp_S is None else micro.old_logp_S
        advantages_S = micro.require("advantages_S", self.needed_by)
        objective_S, clipped_S = clipped_surrogate(
            logp_S, old_S, advantages_S, self.clip_low, self.clip_high
        )
        loss_S = -objective_S - self.entropy_coef * entropy_S
        if self.kl_coef:
            reference_S = micro.require("reference_logp_S", self.needed_by)
            loss_S = loss_S + self.kl_coef * kl_estimate(logp_S, reference_S, self.kl_estimator)
        metrics = {
            "policy/clip_fraction": clipped_S.sum(),
            "policy/entropy": entropy_S.detach().sum(),
            "policy/kl": _reported_kl(logp_S.detach(), old_S, micro.reference_logp_S).sum(),
        }
        return LossOutput(loss_S.sum() / denominator, metrics)


def _reported_kl(logp_S: Tensor, old_S: Tensor, reference_S: Tensor | None) -> Tensor:
    """KL(policy, reference), or KL(old, policy) without a reference; k3 in both cases."""
    if reference_S is not None:
        return kl_estimate(logp_S, reference_S, "k3")
    return kl_estimate(old_S, logp_S, "k3")
