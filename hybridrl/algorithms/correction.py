"""Off-policy correction: importance weights, rejection, and what to say of them. Pure functions.

The ratio k = old / behaviour is that of the policy at the start of the step to the one that was
sampled from; with the objective's own ratio, current / old, it makes decoupled PPO (Hilton et al.
2021, arXiv 2110.00641). Nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridrl.algorithms.surrogate import importance_ratio
from hybridrl.batch import RolloutBatch
from hybridrl.config.correction import CorrectionConfig, Level

Sum = Callable[[Tensor], Tensor]
"""Returns at each token the sum over its response."""


def ratio(log_ratio_N: Tensor, level: Level, sum_of: Sum) -> Tensor:
    """Returns at each token k of the level, between exp(-20) and exp(20).

    Args:
        log_ratio_N: old - behaviour, a token.
        level: token: exp(d_t); sequence: exp(sum_t d_t); geometric: exp(mean_t d_t); none: 1.
        sum_of: over the response of each token.
    """
    if level == "none":
        return torch.ones_like(log_ratio_N)
    log_k_N = log_ratio_N
    if level != "token":
        log_k_N = sum_of(log_ratio_N)
    if level == "geometric":
        log_k_N = log_k_N / sum_of(torch.ones_like(log_ratio_N)).clamp(min=1)
    return importance_ratio(log_k_N)


def bounded(ratio_N: Tensor, config: CorrectionConfig) -> Tensor:
    """Returns the importance weights: truncated to [min, max] (TIS, Yao et al. 2025,
    fengyao.notion.site/off-policy-rl), or 0 outside of it (with level token IcePop, Ling team 2025,
    arXiv 2510.18855; with sequence masked importance sampling, Liu, Li et al. 2025,
    richardli.xyz/rl-collapse).
    """
    if config.bound == "truncate":
        return ratio_N.clamp(config.min, config.max)
    return ratio_N.masked_fill((ratio_N < config.min) | (ratio_N > config.max), 0.0)


def kept(ratio_N: Tensor, config: CorrectionConfig) -> Tensor:
    """Returns where the ratio is within the bounds of rejection."""
    low, high = config.reject_bounds
    return (ratio_N >= low) & (ratio_N <= high)


def weights(log_ratio_N: Tensor, config: CorrectionConfig, sum_of: Sum) -> Tensor:
    """Returns what each token's objective is multiplied by; arguments as of `ratio`."""
    weight_N = torch.ones_like(log_ratio_N)
    if config.weight != "none":
        weight_N = bounded(ratio(log_ratio_N, config.weight, sum_of), config)
    if config.reject != "none":
        weight_N = weight_N * kept(ratio(log_ratio_N, config.reject, sum_of), config)
    return weight_N


def off_policy_metrics(
    batch: RolloutBatch, old_logp_T: Tensor, config: CorrectionConfig | None = None
) -> dict[str, float]:
    """Returns how far the behaviour policy is from the one at the start of the step.

    `mismatch/*` always. Of each response i, with d_t = old - behaviour of its token t,
    e_i = -mean_t behaviour, the engine's log-perplexity, and o_i = -mean_t old, the trainer's:
    `rollout_ppl` = mean_i exp(e_i), `training_ppl` = mean_i exp(o_i), `*_log_ppl` = mean_i of e_i
    and of o_i, `log_ppl_diff` = mean_i (o_i - e_i), above 0 where the trainer is the less
    confident, with the mean of its absolute value, its largest and its least, and `ppl_ratio` =
    mean_i exp(o_i - e_i). Over all tokens `kl_k1` = mean(-d_t) and `chi2_token` = mean(k^2) - 1,
    k = exp(d_t); `chi2_sequence` = mean_i (exp(sum_t d_t)^2) - 1. These are what the code of verl's
    rollout correction computes (verl/trainer/ppo/rollout_corr_helper.py); its documentation
    (docs/algo/rollout_corr.md) has another sign of `log_ppl_diff` and another `ppl_ratio`.
    `correction/*` where there are weights or a rejection.

    Args:
        batch: its `behaviour_logp_T` are the engine's.
        old_logp_T: of the policy at the start of the step, (T,).
        config: of the correction, if there is one.
    """
    mask_T, lengths_B = batch.response_mask_T, batch.response_lengths_B
    sums = _Sums(lengths_B)
    engine_R, old_R = (
        column_T.masked_select(mask_T).double() for column_T in (batch.behaviour_logp_T, old_logp_T)
    )
    log_ratio_R = old_R - engine_R
    engine_B, old_B = -sums(engine_R) / lengths_B, -sums(old_R) / lengths_B
    gap_B = old_B - engine_B
    product_B = importance_ratio(sums(log_ratio_R))
    found = {
        "rollout_ppl": engine_B.exp().mean(),
        "training_ppl": old_B.exp().mean(),
        "rollout_log_ppl": engine_B.mean(),
        "training_log_ppl": old_B.mean(),
        "ppl_ratio": importance_ratio(gap_B).mean(),
        "log_ppl_diff": gap_B.mean(),
        "log_ppl_abs_diff": gap_B.abs().mean(),
        "log_ppl_diff_max": gap_B.max(),
        "log_ppl_diff_min": gap_B.min(),
        "kl_k1": -log_ratio_R.mean(),
        "chi2_token": ratio(log_ratio_R, "token", sums.spread).square().mean() - 1,
        "chi2_sequence": product_B.square().mean() - 1,
    }
    metrics = {f"mismatch/{name}": float(value) for name, value in found.items()}
    if config is not None:
        metrics |= _correction_metrics(log_ratio_R, sums, config)
    return metrics


class _Sums:
    """Sums over the responses of a batch, whose tokens lie one after the other."""

    def __init__(self, lengths_B: Tensor) -> None:
        self.lengths_B, self._sample_R = lengths_B, torch.repeat_interleave(lengths_B)

    def __call__(self, value_R: Tensor) -> Tensor:
        """Returns the sum of each response."""
        return torch.bincount(self._sample_R, value_R, len(self.lengths_B))

    def spread(self, value_R: Tensor) -> Tensor:
        """Returns at each token the sum of its response."""
        return self(value_R)[self._sample_R]


def _correction_metrics(
    log_ratio_R: Tensor, sums: _Sums, config: CorrectionConfig
) -> dict[str, float]:
    """Returns what there is to say of the weights before their bounds, k, and of what was rejected.

    `effective_sample_size` = (sum k)^2 / (n sum k^2), a share of the n tokens. `weight_*` of the
    tokens' k and `sequence_weight_*` of the responses' means of k: mean, deviation, least, largest,
    largest |k - 1|, and the shares above `max` and below `min` (1 / `max` where that is 0). The
    deviation divides by n over tokens and by n - 1 over responses, which are few; 0 of one.
    """
    metrics = {}
    if config.weight != "none":
        weight_R = ratio(log_ratio_R, config.weight, sums.spread)
        size = weight_R.sum() ** 2 / (len(weight_R) * weight_R.square().sum())
        metrics["correction/effective_sample_size"] = float(size)
        mean_B = sums(weight_R) / sums.lengths_B
        for name, value_N, ddof in (
            ("weight", weight_R, 0),
            ("sequence_weight", mean_B, min(len(mean_B) - 1, 1)),
        ):
            spread = _spread(value_N, config, ddof)
            metrics |= {f"correction/{name}_{k}": v for k, v in spread.items()}
    if config.reject != "none":
        lost_R = (~kept(ratio(log_ratio_R, config.reject, sums.spread), config)).double()
        metrics["correction/rejected_tokens"] = float(lost_R.mean())
        metrics["correction/rejected_sequences"] = float((sums(lost_R) > 0).double().mean())
    return metrics


def _spread(weight_N: Tensor, config: CorrectionConfig, ddof: int) -> dict[str, float]:
    low = config.min or 1 / config.max
    found = {
        "mean": weight_N.mean(),
        "std": weight_N.std(correction=ddof),
        "min": weight_N.min(),
        "max": weight_N.max(),
        "max_deviation": (weight_N - 1).abs().max(),
        "fraction_high": (weight_N > config.max).double().mean(),
        "fraction_low": (weight_N < low).double().mean(),
    }
    return {name: float(value) for name, value in found.items()}
