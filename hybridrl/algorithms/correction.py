"""Off-policy correction: importance weights, rejection, and what to say of them. Pure functions.

The ratio k = old / behaviour is that of the policy at the start of the step to the one that was
sampled from; with the objective's own ratio, current / old, it makes decoupled PPO (Hilton et al.
2021, arXiv 2110.00641). Nothing here has a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hybridrl.algorithms.advantage import response_values
from hybridrl.algorithms.log_ratio import importance_ratio
from hybridrl.algorithms.over_tokens import OverTokens
from hybridrl.config.correction import CorrectionConfig, Level
from hybridrl.contracts.batch import RolloutBatch

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
        old_logp_T: of the policy at the start of the step, (T,) like the batch's own columns.
        config: of the correction, if there is one.
    """
    lengths_B, over = batch.response_lengths_B, OverTokens(batch)
    engine_R, old_R = (
        response_values(column_T, batch).double()
        for column_T in (batch.behaviour_logp_T, old_logp_T)
    )
    log_ratio_R, spread = old_R - engine_R, _Spread(batch.response_lengths_H)
    square_R = ratio(log_ratio_R, "token", spread).square()
    engine_B, old_B, log_ratio_B, square_B = over.sums(
        engine_R, old_R, log_ratio_R, square_R
    ).unbind(1)
    engine_B, old_B = -engine_B / lengths_B, -old_B / lengths_B
    gap_B = old_B - engine_B
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
        "kl_k1": -log_ratio_B.sum() / over.num,
        "chi2_token": square_B.sum() / over.num - 1,
        "chi2_sequence": importance_ratio(log_ratio_B).square().mean() - 1,
    }
    metrics = {f"mismatch/{name}": float(value) for name, value in found.items()}
    if config is not None:
        metrics |= _correction_metrics(log_ratio_R, spread, over, lengths_B, config)
    return metrics


class _Spread:
    """Sums over the responses on this rank, whose tokens lie one after the other."""

    def __init__(self, lengths_H: Tensor) -> None:
        self._sample_R, self._num = torch.repeat_interleave(lengths_H), len(lengths_H)

    def __call__(self, value_R: Tensor) -> Tensor:
        """Returns at each token the sum of its response."""
        return torch.bincount(self._sample_R, value_R, self._num)[self._sample_R]


def _correction_metrics(
    log_ratio_R: Tensor,
    spread: _Spread,
    over: OverTokens,
    lengths_B: Tensor,
    config: CorrectionConfig,
) -> dict[str, float]:
    """Returns what there is to say of the weights before their bounds, k, and of what was rejected.

    `effective_sample_size` = (sum k)^2 / (n sum k^2), a share of the n tokens. `weight_*` of the
    tokens' k and `sequence_weight_*` of the responses' means of k: mean, deviation, least, largest,
    largest |k - 1|, and the shares above `max` and below `min` (1 / `max` where that is 0). The
    deviation divides by n over tokens and by n - 1 over responses, which are few; 0 of one.
    """
    metrics: dict[str, float] = {}
    if config.weight != "none":
        weight_R = ratio(log_ratio_R, config.weight, spread)
        of_tokens, mean_B = _weights_of_tokens(weight_R, over, lengths_B, config)
        metrics |= {f"correction/{name}": value for name, value in of_tokens.items()}
        metrics |= {
            f"correction/sequence_weight_{name}": float(value)
            for name, value in _weights_of_responses(mean_B, config).items()
        }
    if config.reject != "none":
        is_kept_R = kept(ratio(log_ratio_R, config.reject, spread), config)
        lost_B = over.sums(~is_kept_R)[:, 0]
        metrics["correction/rejected_tokens"] = float(lost_B.sum()) / over.num
        metrics["correction/rejected_sequences"] = float((lost_B > 0).double().mean())
    return metrics


def _weights_of_tokens(
    weight_R: Tensor, over: OverTokens, lengths_B: Tensor, config: CorrectionConfig
) -> tuple[dict[str, float], Tensor]:
    """Returns what there is to say of all tokens' weights, and each response's mean: (B,)."""
    low = config.min or 1 / config.max
    sums_B4 = over.sums(weight_R, weight_R.square(), weight_R > config.max, weight_R < low)
    total, squares, num_high, num_low = sums_B4.sum(0).tolist()
    mean = total / over.num
    variance = float(over.means((weight_R - mean).square()))
    largest, least, deviation = over.largest(weight_R, -weight_R, (weight_R - 1).abs()).amax(0)
    return {
        "effective_sample_size": total**2 / (over.num * squares),
        "weight_mean": mean,
        "weight_std": variance**0.5,
        "weight_min": -float(least),
        "weight_max": float(largest),
        "weight_max_deviation": float(deviation),
        "weight_fraction_high": num_high / over.num,
        "weight_fraction_low": num_low / over.num,
    }, sums_B4[:, 0] / lengths_B


def _weights_of_responses(weight_B: Tensor, config: CorrectionConfig) -> dict[str, Tensor]:
    low = config.min or 1 / config.max
    return {
        "mean": weight_B.mean(),
        "std": weight_B.std(correction=min(len(weight_B) - 1, 1)),
        "min": weight_B.min(),
        "max": weight_B.max(),
        "max_deviation": (weight_B - 1).abs().max(),
        "fraction_high": (weight_B > config.max).double().mean(),
        "fraction_low": (weight_B < low).double().mean(),
    }
