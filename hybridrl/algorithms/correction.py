"""Off-policy correction: importance weights, rejection and their metrics. Pure functions.

The ratio k = old / behaviour compares the policy at the start of the step with the policy that
sampled the tokens. Together with the objective's own ratio, current / old, this is decoupled PPO
(Hilton et al. 2021, arXiv 2110.00641). No result of this module has a gradient.
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
"""Function that returns, at each token, the sum over the token's response."""


def ratio(log_ratio_N: Tensor, level: Level, sum_of: Sum) -> Tensor:
    """Returns k at each token, clamped to [exp(-20), exp(20)].

    Args:
        log_ratio_N: d_t = old - behaviour log-probability of each token.
        level: token: exp(d_t); sequence: exp(sum_t d_t); geometric: exp(mean_t d_t); none: 1.
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
    """Returns the importance weights.

    If `bound` is truncate, k is clamped to [min, max] (TIS, Yao et al. 2025,
    fengyao.notion.site/off-policy-rl). Otherwise weights outside [min, max] are set to 0. With
    level token this is IcePop (Ling team 2025, arXiv 2510.18855); with level sequence it is masked
    importance sampling (Liu, Li et al. 2025, richardli.xyz/rl-collapse).
    """
    if config.bound == "truncate":
        return ratio_N.clamp(config.min, config.max)
    return ratio_N.masked_fill((ratio_N < config.min) | (ratio_N > config.max), 0.0)


def is_kept(ratio_N: Tensor, config: CorrectionConfig) -> Tensor:
    """Returns a mask of the tokens whose ratio is within the bounds; the others are rejected."""
    low, high = config.reject_bounds
    return (ratio_N >= low) & (ratio_N <= high)


def weights(log_ratio_N: Tensor, config: CorrectionConfig, sum_of: Sum) -> Tensor:
    """Returns the factor by which each token's objective is multiplied; arguments as in `ratio`."""
    weight_N = torch.ones_like(log_ratio_N)
    if config.weight != "none":
        weight_N = bounded(ratio(log_ratio_N, config.weight, sum_of), config)
    if config.reject != "none":
        weight_N = weight_N * is_kept(ratio(log_ratio_N, config.reject, sum_of), config)
    return weight_N


def off_policy_metrics(
    batch: RolloutBatch, old_logp_T: Tensor, config: CorrectionConfig | None = None
) -> dict[str, float]:
    """Measures the distance between the behaviour policy and the policy at the start of the step.

    The metrics `mismatch/*` are always returned. For response i let d_t = old - behaviour at token
    t, e_i = -mean_t behaviour (the engine's log-perplexity) and o_i = -mean_t old (the trainer's).

        rollout_ppl, training_ppl: mean_i exp(e_i), mean_i exp(o_i).
        rollout_log_ppl, training_log_ppl: mean_i e_i, mean_i o_i.
        log_ppl_diff: mean_i (o_i - e_i), above 0 if the trainer is less confident than the engine.
            Three more metrics: mean absolute value, maximum and minimum of o_i - e_i.
        ppl_ratio: mean_i exp(o_i - e_i).
        kl_k1, chi2_token: mean(-d_t) and mean(exp(d_t)^2) - 1 over all tokens.
        chi2_sequence: mean_i exp(sum_t d_t)^2 - 1.

    The definitions are the same as in the code of verl's rollout correction
    (verl/trainer/ppo/rollout_corr_helper.py). verl's documentation (docs/algo/rollout_corr.md)
    states the opposite sign for `log_ppl_diff` and another `ppl_ratio`. The metrics `correction/*`
    are returned if `config`, the section `algorithm.correction`, turns on weights or rejection.
    """
    lengths_B, over = batch.response_lengths_B, OverTokens(batch)
    engine_R, old_R = (
        response_values(column_T, batch).double()
        for column_T in (batch.behaviour_logp_T, old_logp_T)
    )
    log_ratio_R, sum_of = old_R - engine_R, _ResponseSums(batch.response_lengths_H)
    square_R = ratio(log_ratio_R, "token", sum_of).square()
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
        metrics |= _correction_metrics(log_ratio_R, sum_of, over, lengths_B, config)
    return metrics


class _ResponseSums:
    """Returns, at each token on this rank, the sum over the token's response."""

    def __init__(self, lengths_H: Tensor) -> None:
        self._sample_R, self._num = torch.repeat_interleave(lengths_H), len(lengths_H)

    def __call__(self, value_R: Tensor) -> Tensor:
        return torch.bincount(self._sample_R, value_R, self._num)[self._sample_R]


def _correction_metrics(
    log_ratio_R: Tensor,
    sum_of: Sum,
    over: OverTokens,
    lengths_B: Tensor,
    config: CorrectionConfig,
) -> dict[str, float]:
    """Returns metrics of the weights k before they are bounded, and of rejection.

    `effective_sample_size` = (sum k)^2 / (n sum k^2) is a fraction of the n tokens. `weight_*`
    describe the k of tokens; `sequence_weight_*` describe the mean k of each response. Both groups
    of metrics include mean, standard deviation, minimum, maximum, largest |k - 1|, and the
    fractions above `max` and below `min` (1 / `max` if `min` is 0). The standard deviation divides
    by n for tokens and by n - 1 for responses; it is 0 if there is only one response.
    """
    metrics: dict[str, float] = {}
    if config.weight != "none":
        weight_R = ratio(log_ratio_R, config.weight, sum_of)
        token_metrics, mean_B = _token_weight_metrics(weight_R, over, lengths_B, config)
        metrics |= {f"correction/{name}": value for name, value in token_metrics.items()}
        metrics |= {
            f"correction/sequence_weight_{name}": float(value)
            for name, value in _response_weight_metrics(mean_B, config).items()
        }
    if config.reject != "none":
        is_kept_R = is_kept(ratio(log_ratio_R, config.reject, sum_of), config)
        rejected_B = over.sums(~is_kept_R)[:, 0]
        metrics["correction/rejected_tokens"] = float(rejected_B.sum()) / over.num
        metrics["correction/rejected_sequences"] = float((rejected_B > 0).double().mean())
    return metrics


def _token_weight_metrics(
    weight_R: Tensor, over: OverTokens, lengths_B: Tensor, config: CorrectionConfig
) -> tuple[dict[str, float], Tensor]:
    """Returns metrics of all tokens' weights, and the mean weight of each response (B,)."""
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


def _response_weight_metrics(weight_B: Tensor, config: CorrectionConfig) -> dict[str, Tensor]:
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
