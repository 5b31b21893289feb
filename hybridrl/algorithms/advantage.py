"""Rewards to advantages, on the whole batch. Pure functions, float64 inside, CPU.

`R` is the number of response tokens of a batch: its samples' responses one after the other,
without the prompts; `batch.response_mask_T` picks them from a (T,) column.
"""

from __future__ import annotations

from math import comb

import torch
from torch import Tensor

from hybridrl.algorithms.surrogate import KlEstimator, kl_estimate
from hybridrl.batch import TrainBatch


def token_kl(batch: TrainBatch, estimator: KlEstimator, needed_by: str) -> Tensor:
    """Returns the estimated KL of the old policy to the reference at each token.

    Returns:
        (T,) float64, zero on prompt tokens.
    """
    old_T = batch.require("old_logp_T", needed_by).double()
    reference_T = batch.require("reference_logp_T", needed_by).double()
    return kl_estimate(old_T, reference_T, estimator) * batch.response_mask_T


def last_token_rewards(reward_B: Tensor, response_lengths_B: Tensor) -> Tensor:
    """Puts each sample's reward on the last token of its response: (R,) float64, else zero."""
    rewards_R = torch.zeros(int(response_lengths_B.sum()), dtype=torch.float64)
    rewards_R[response_lengths_B.cumsum(0) - 1] = reward_B.double()
    return rewards_R


def overlong_penalty(response_lengths_B: Tensor, longest: int, buffer: int) -> Tensor:
    """Penalises long responses (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13).

    Returns:
        (B,) float64: 0 up to `longest - buffer` tokens, from there falling linearly to -1 at
        `longest`, -1 beyond.
    """
    over_B = response_lengths_B.double() - (longest - buffer)
    return -(over_B / buffer).clamp(0, 1)


def gae(
    rewards_R: Tensor,
    values_R: Tensor,
    response_lengths_B: Tensor,
    gamma: float,
    lam: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    A_t = sum over l >= 0 of (gamma lam)^l delta_{t+l}, with delta_t = r_t + gamma V(s_{t+1}) -
    V(s_t). The state after the last token is terminal: its value is 0.

    Args:
        rewards_R: reward of each response token.
        values_R: V(s_t), the value of the state that token t was sampled from.
        response_lengths_B: response tokens of each sample.
        gamma: discount a token.
        lam: lambda, one number or one a sample.

    Returns:
        Advantages and returns (advantage + value), each (R,) float64.
    """
    longest, num_samples = int(response_lengths_B.max()), len(response_lengths_B)
    width = longest + 1
    starts_B = response_lengths_B.cumsum(0) - response_lengths_B
    # Beyond the end of a response rewards and values stay 0, and so do deltas and advantages: no
    # mask is needed.
    shift_B = torch.arange(num_samples) * width - starts_B
    place_R = shift_B.repeat_interleave(response_lengths_B).add_(torch.arange(len(values_R)))
    rewards_BL, values_BL = (
        torch.zeros(num_samples * width, dtype=torch.float64)
        .index_copy_(0, place_R, column_R.double())
        .view(num_samples, width)
        for column_R in (rewards_R, values_R)
    )
    # delta, which the loop turns into advantages from the back; time comes first there, so that it
    # walks over contiguous rows.
    rewards_BL[:, :-1] += gamma * values_BL[:, 1:]
    advantages_LB = (rewards_BL - values_BL).t().contiguous()
    decay_B = torch.as_tensor(gamma * lam, dtype=torch.float64).expand(num_samples)
    for t in reversed(range(longest)):
        advantages_LB[t].addcmul_(decay_B, advantages_LB[t + 1])
    advantages_R = advantages_LB.t().contiguous().view(-1)[place_R]
    return advantages_R, advantages_R + values_R.double()


def length_lambda(response_lengths_B: Tensor, alpha: float) -> Tensor:
    """Returns lambda = 1 - 1 / (alpha length) of each sample, 0 where that is negative.

    The length-adaptive GAE of VAPO (Yue et al. 2025, arXiv 2504.05118, sec. 4.2).
    """
    return (1 - 1 / (alpha * response_lengths_B.double())).clamp(min=0)


def minus_group_mean(reward_B: Tensor, group_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
    """Subtracts from each reward the mean of its group, each sample counted `weight_B` times.

    Without weights this is the advantage of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, sec.
    3.2); with the response lengths as weights b = sum(l r) / sum(l), the optimal baseline of OPO
    (Hao et al. 2025, arXiv 2505.23585).

    Returns:
        (B,) float64; a group of one gives 0.
    """
    reward_B = reward_B.double()
    weight_B = torch.ones_like(reward_B) if weight_B is None else weight_B.double()
    total_B = _group_sum(weight_B, group_B)
    return reward_B - _group_sum(weight_B * reward_B, group_B) / total_B


def leave_one_out(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Subtracts from each reward the mean of the group's other rewards.

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740): r_i - sum(r_j, j != i) / (n - 1),
    which is n / (n - 1) times the distance from the mean of all.
    """
    size_B = _group_sum(torch.ones_like(reward_B, dtype=torch.float64), group_B)
    return minus_group_mean(reward_B, group_B) * size_B / (size_B - 1)


def pass_at_k(is_passed_B: Tensor, group_B: Tensor, k: int, normalize_std: bool) -> Tensor:
    """Compares what a sample adds to pass@k with the group's pass@k, in closed form.

    Chen et al. 2025, arXiv 2508.10751 ("analytical derivation"): a set of k samples of the group
    is worth 1 if one of them passes, and a sample the mean over the sets that hold it. With n
    samples of which w are wrong, mean = 1 - C(w, k) / C(n, k) and std = sqrt(mean (1 - mean)) over
    all sets; a right sample is worth 1, a wrong one 1 - C(w - 1, k - 1) / C(n - 1, k - 1).

    Returns:
        (B,) float64: (worth - mean) / std, 0 where std is; undivided if not `normalize_std`.
    """
    _, index_B, size_G = group_B.unique(return_inverse=True, return_counts=True)
    wrong_G = size_G - torch.bincount(index_B, is_passed_B.double(), len(size_G)).long()
    rows = []
    for n, w in zip(size_G.tolist(), wrong_G.tolist(), strict=True):
        mean = 1 - comb(w, k) / comb(n, k)
        std = (mean * (1 - mean)) ** 0.5 if normalize_std else 1.0
        worth = 1 - comb(max(w - 1, 0), k - 1) / comb(n - 1, k - 1)
        rows.append([0.0, 0.0] if std == 0 else [(worth - mean) / std, (1 - mean) / std])
    return torch.tensor(rows, dtype=torch.float64)[index_B, is_passed_B.long()]


def divided_by_group_std(centred_B: Tensor, group_B: Tensor, epsilon: float = 1e-6) -> Tensor:
    """Divides by the standard deviation (n - 1) of the group, plus epsilon.

    GRPO (Shao et al. 2024, arXiv 2402.03300, sec. 4.1.2).

    Args:
        centred_B: rewards less a baseline; the deviation is about their own mean.
    """
    size_B = _group_sum(torch.ones_like(centred_B), group_B)
    square_B = _group_sum(minus_group_mean(centred_B, group_B).square(), group_B)
    return centred_B / ((square_B / (size_B - 1).clamp(min=1)).sqrt() + epsilon)


def informative_scale(reward_B: Tensor, group_B: Tensor) -> float:
    """Returns B / (B - M), M samples being in groups whose rewards are all equal; 1 if all are.

    The accurate gradient estimation of GPG (Chu et al. 2025, arXiv 2504.02546).
    """
    _, index_B = group_B.unique(return_inverse=True)
    one_G = torch.zeros(int(index_B.max()) + 1, dtype=reward_B.dtype)
    one_G[index_B] = reward_B  # any one reward of the group
    num_others_B = _group_sum((reward_B != one_G[index_B]).double(), group_B)
    num_informative = int((num_others_B > 0).sum())
    return len(reward_B) / num_informative if num_informative else 1.0


def without_high_covariance(
    advantages_R: Tensor,
    logp_R: Tensor,
    key_R: Tensor,
    fraction: float,
    low: float,
    high: float,
) -> Tensor:
    """Takes the advantage, and so the gradient, from some tokens that would cost much entropy.

    Clip-Cov (Cui et al. 2025, arXiv 2505.22617): of the tokens with (logp - mean)
    (A - mean) in [low, high], int(fraction R) are drawn, one at least. The covariance is that of
    the policy at the start of the step, so that all updates of a step, however they are cut into
    micro-batches, agree on it.

    Args:
        key_R: int64; the tokens with the smallest keys are the ones drawn.
    """
    covariance_R = (logp_R - logp_R.mean()) * (advantages_R - advantages_R.mean())
    high_R = ((covariance_R >= low) & (covariance_R <= high)).nonzero()[:, 0]
    count = max(int(fraction * len(advantages_R)), 1)
    drawn = high_R[key_R[high_R].argsort()[:count]]
    return advantages_R.index_fill(0, drawn, 0.0)


def token_keys(batch: TrainBatch) -> Tensor:
    """Returns for each response token a number that looks random: (R,) int64.

    It is made of the policy's version, the sample's number in the step and the token's place, so
    that it is the same on every rank, in any order of samples, and in a resumed run.
    """
    lengths_B = batch.response_lengths_B
    sample_R = torch.repeat_interleave(lengths_B)
    place_R = torch.arange(len(sample_R)) - (lengths_B.cumsum(0) - lengths_B)[sample_R]
    seed_B = batch.versions_B * 0x9E3779B1 + batch.sample_ids_B
    key_R = ((seed_B[sample_R] << 24) + place_R) & 0x7FFFFFFFFFFFFFFF
    for shift in (31, 29):  # the rounds of splitmix64 (Steele et al. 2014), product modulo 2^63
        key_R = (key_R ^ (key_R >> shift)) * 0x3F58476D1CE4E5B9 & 0x7FFFFFFFFFFFFFFF
    return key_R ^ (key_R >> 32)


def _group_sum(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Returns for each sample the sum over its group."""
    _, index_B = group_B.unique(return_inverse=True)
    return torch.bincount(index_B, value_B)[index_B]


def whiten(values_N: Tensor, counts_N: Tensor | None = None, epsilon: float = 1e-8) -> Tensor:
    """Scales to mean 0 and standard deviation (n - 1) 1 over all response tokens of the batch.

    Args:
        values_N: one a token, or one a sample with `counts_N`, its number of tokens.
    """
    if counts_N is None:
        centred_N, num = values_N - values_N.mean(), len(values_N)
        total = centred_N.square().sum()
    else:
        num = int(counts_N.sum())
        centred_N = values_N - (values_N * counts_N).sum() / num
        total = (centred_N.square() * counts_N).sum()
    return centred_N / ((total / max(num - 1, 1)).sqrt() + epsilon)


def response_column(values_R: Tensor, batch: TrainBatch) -> Tensor:
    """Puts values of response tokens into a column: (T,) float32, zero on prompt tokens."""
    column_T = torch.zeros(batch.num_tokens)
    column_T[batch.response_mask_T] = values_R.float()
    return column_T
