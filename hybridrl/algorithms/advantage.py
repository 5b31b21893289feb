"""Computes advantages from rewards. Pure functions in float64 on the CPU.

Sizes: B samples of the step, known on every rank; H samples whose tokens are on this rank; T tokens
of these samples; R response tokens among them, without the prompts. `response_values` selects the R
response values from a (T,) column, and `response_column` does the inverse. Boolean indexing and
repetition use numpy, which takes a third of torch's time for a million tokens. over_tokens.py
computes statistics over the tokens on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from math import comb

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.log_ratio import KlEstimator, kl_estimate
from hybridrl.algorithms.over_tokens import OverTokens
from hybridrl.contracts.batch import RolloutBatch, TrainBatch

Keys = Callable[[Tensor], Tensor]
"""Function that maps indices of response tokens to pseudo-random numbers, such as `token_keys`."""


def token_kl(batch: TrainBatch, estimator: KlEstimator, needed_by: str) -> Tensor:
    """Estimates the KL of old policy and reference: (T,) float64, zero on prompt tokens."""
    old_T = batch.require("old_logp_T", needed_by).double()
    reference_T = batch.require("reference_logp_T", needed_by).double()
    return kl_estimate(old_T, reference_T, estimator) * batch.response_mask_T


def sequence_kl(batch: TrainBatch, needed_by: str) -> float:
    """Returns the KL (k1) to the reference per response, averaged over responses, in nats."""
    kl_R = response_values(token_kl(batch, "k1", needed_by), batch)
    return float(OverTokens(batch).totals(kl_R)) / batch.by_sample().num_samples


def last_token_rewards(reward_H: Tensor, response_lengths_H: Tensor) -> Tensor:
    """Returns each sample's reward at its last response token, zero at others: (R,) float64."""
    rewards_R = torch.zeros(int(response_lengths_H.sum()), dtype=torch.float64)
    rewards_R[response_lengths_H.cumsum(0) - 1] = reward_H.double()
    return rewards_R


def overlong_penalty(response_lengths_B: Tensor, longest: int, buffer: int) -> Tensor:
    """Returns the penalty for long responses (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13).

    Returns:
        (B,) float64: 0 for responses of up to `longest - buffer` tokens, then falling linearly to
        -1 at `longest` tokens, and -1 for longer responses.
    """
    over_B = response_lengths_B.double() - (longest - buffer)
    return -(over_B / buffer).clamp(0, 1)


def gae(
    rewards_R: Tensor,
    values_R: Tensor,
    response_lengths_H: Tensor,
    gamma: float,
    lam: float | Tensor,
    critic_lam: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    A_t = sum over l >= 0 of (gamma lam)^l delta_{t+l}, with delta_t = r_t + gamma V(s_{t+1}) -
    V(s_t). The state after the last token is terminal, so its value is 0.

    Args:
        values_R: V(s_t), the value of the state in which token t was sampled.
        response_lengths_H: Number of response tokens of each sample.
        lam: Lambda of GAE: one number for all samples, or one per sample.
        critic_lam: Lambda for the returns. If None, `lam` is used.

    Returns:
        Advantages and returns (advantage + value), each (R,) float64.
    """
    values_R = values_R.double()
    ends_H = response_lengths_H.cumsum(0)
    next_R = values_R.roll(-1)
    next_R[ends_H - 1] = 0.0
    delta_R = next_R.mul_(gamma).add_(rewards_R).sub_(values_R)
    advantages_R = _discounted_sums(delta_R, response_lengths_H, gamma * lam)
    if critic_lam is None:
        return advantages_R, advantages_R + values_R
    returns_R = _discounted_sums(delta_R, response_lengths_H, gamma * critic_lam) + values_R
    return advantages_R, returns_R


def _discounted_sums(value_R: Tensor, lengths_B: Tensor, decay: float | Tensor) -> Tensor:
    """Returns the sum over l >= 0 of decay^l value_{t+l} for each token t, in its sample: (R,)."""
    decay_B = torch.as_tensor(decay, dtype=torch.float64).expand(len(lengths_B))
    if not bool(decay_B.any()):  # also true if this rank has no samples
        return value_R
    if bool((decay_B == 1).all()):
        total_R = value_R.cumsum(0)
        end_B = total_R[lengths_B.cumsum(0) - 1]
        return repeated(end_B, lengths_B).sub_(total_R).add_(value_R)
    is_in_BL = (torch.arange(int(lengths_B.max())) < lengths_B[:, None]).numpy()
    # Values after the end of a response are 0, so the loop needs no mask. Time is the first dim in
    # the loop, so that rows are contiguous.
    value_BL = torch.zeros(is_in_BL.shape, dtype=torch.float64)
    value_BL.numpy()[is_in_BL] = value_R.numpy()
    value_LB = value_BL.t().contiguous()
    rows = value_LB.unbind(0)
    for now_B, next_B in zip(rows[-2::-1], rows[:0:-1], strict=True):
        now_B.addcmul_(decay_B, next_B)
    return torch.from_numpy(value_BL.copy_(value_LB.t()).numpy()[is_in_BL])


def length_lambda(response_lengths_B: Tensor, alpha: float) -> Tensor:
    """Returns lambda = max(0, 1 - 1 / (alpha * length)) for each sample.

    Used in VAPO's length-adaptive GAE (Yue et al. 2025, arXiv 2504.05118, eq. 5).
    """
    return (1 - 1 / (alpha * response_lengths_B.double())).clamp(min=0)


def minus_group_mean(reward_B: Tensor, group_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
    """Subtracts from each reward the weighted mean of the rewards in its group.

    Without weights this is the advantage of Dr. GRPO (Liu et al. 2025, arXiv 2503.20783, sec. 3.2).
    With the response lengths as weights the mean is sum(l r) / sum(l), the optimal baseline of OPO
    (Hao et al. 2025, arXiv 2505.23585).

    Returns:
        (B,) float64; 0 for a group of one sample.
    """
    reward_B = reward_B.double()
    weight_B = torch.ones_like(reward_B) if weight_B is None else weight_B.double()
    total_B = _group_sum(weight_B, group_B)
    # First subtract one of the group's rewards, so that equal rewards result in exactly 0.
    reward_B = reward_B - _group_member(reward_B, group_B)
    return reward_B - _group_sum(weight_B * reward_B, group_B) / total_B


def leave_one_out(reward_B: Tensor, group_B: Tensor) -> Tensor:
    """Subtracts from each reward the mean of the other rewards in its group.

    RLOO (Ahmadian et al. 2024, arXiv 2402.14740): r_i - sum(r_j, j != i) / (n - 1), which equals n
    / (n - 1) times r_i minus the mean of all n.
    """
    size_B = _group_sum(torch.ones_like(reward_B, dtype=torch.float64), group_B)
    return minus_group_mean(reward_B, group_B) * size_B / (size_B - 1)


def pass_at_k(is_passed_B: Tensor, group_B: Tensor, k: int, normalize_std: bool) -> Tensor:
    """Returns the advantage of each sample for pass@k, in closed form.

    Chen et al. 2025, arXiv 2508.10751, eq. 11-15 ("analytical derivation"). A set of k samples from
    the group has reward 1 if any of them passes. The worth of a sample is the mean reward over all
    sets that contain the sample. If w of n samples are wrong, the mean over all sets is 1 - C(w, k)
    / C(n, k) and the std is sqrt(mean (1 - mean)). The worth is 1 for a correct sample and 1 - C(w
    - 1, k - 1) / C(n - 1, k - 1) for a wrong one.

    Returns:
        (B,) float64: (worth - mean) / std, or 0 if std is 0. Without `normalize_std`: worth - mean.
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


def divided_by_group_std(centred_B: Tensor, group_B: Tensor) -> Tensor:
    """Divides values by the standard deviation (n - 1) around their group's mean, plus 1e-6.

    As in GRPO (Shao et al. 2024, arXiv 2402.03300, sec. 4.1.2).
    """
    size_B = _group_sum(torch.ones_like(centred_B), group_B)
    square_B = _group_sum(minus_group_mean(centred_B, group_B).square(), group_B)
    return centred_B / ((square_B / (size_B - 1).clamp(min=1)).sqrt() + 1e-6)


def uniform_groups(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Returns a mask of the samples in groups whose values are all equal: (B,) bool."""
    return zero_groups(value_B != _group_member(value_B, group_B), group_B)


def zero_groups(advantages_B: Tensor, group_B: Tensor) -> Tensor:
    """Returns a mask of the samples in groups whose advantages are all 0: (B,) bool."""
    return _group_sum((advantages_B != 0).double(), group_B) == 0


def informative_scale(is_uninformative_B: Tensor) -> float:
    """Returns B / (B - M) if M of B samples are uninformative, or 1 if all are.

    GPG calls this factor accurate gradient estimation (Chu et al. 2025, arXiv 2504.02546, eq. 7-8).
    """
    num_informative = int((~is_uninformative_B).sum())
    return len(is_uninformative_B) / num_informative if num_informative else 1.0


def covariance(advantages_R: Tensor, logp_R: Tensor, over: OverTokens) -> Tensor:
    """Returns (logp - mean) (A - mean) of each token: (R,).

    Cui et al. 2025, arXiv 2505.22617, eq. 10, with log-probabilities of the policy at the start of
    the step. The result is the same in all its updates and however samples are split.
    """
    logp_mean, advantage_mean = over.means(logp_R, advantages_R)
    return (logp_R - logp_mean) * (advantages_R - advantage_mean)


def kl_cov_mask(
    advantages_R: Tensor, logp_R: Tensor, over: OverTokens, key: Keys, fraction: float
) -> Tensor:
    """Returns a mask of the tokens that KL-Cov penalises (Cui et al. 2025, eq. 13): (R,) bool.

    KL-Cov penalises the max(1, int(fraction * N)) tokens with the highest covariance among the N
    tokens on all ranks. Tokens with equal covariances are ordered by their keys, smallest first.
    """
    covariance_R, count = covariance(advantages_R, logp_R, over), max(int(fraction * over.num), 1)
    candidates = torch.arange(len(covariance_R))
    if len(candidates) > count:  # only the `count` highest of this rank can be chosen
        candidates = (covariance_R >= covariance_R.topk(count).values[-1]).nonzero()[:, 0]
    chosen_R = torch.zeros(len(covariance_R), dtype=torch.bool)
    chosen_R[candidates] = over.are_first(
        candidates, -covariance_R[candidates], key(candidates), count
    )
    return chosen_R


def clip_cov_advantages(
    advantages_R: Tensor,
    logp_R: Tensor,
    over: OverTokens,
    key: Keys,
    fraction: float,
    low: float,
    high: float,
) -> Tensor:
    """Returns the advantages, set to 0 at some tokens with high covariance.

    Clip-Cov (Cui et al. 2025, arXiv 2505.22617, eq. 11-12) selects, at random, max(1, int(fraction
    * N)) of the tokens whose covariance is in [low, high], where N is the number of tokens on all
    ranks: those with the smallest keys. This keeps the entropy high.
    """
    covariance_R = covariance(advantages_R, logp_R, over)
    candidates = ((covariance_R >= low) & (covariance_R <= high)).nonzero()[:, 0]
    count = max(int(fraction * over.num), 1)
    no_order = torch.zeros(len(candidates), dtype=torch.float64)
    drawn = candidates[over.are_first(candidates, no_order, key(candidates), count)]
    return advantages_R.index_fill(0, drawn, 0.0)


def token_keys(batch: TrainBatch, index_N: Tensor) -> Tensor:
    """Returns a pseudo-random number for each of the given response tokens: (N,) int64.

    It hashes the policy's version, the sample's number in the step, the index of the sequence in
    the sample and the token's position. It is therefore the same on every rank, for any order of
    samples, and in a resumed run.
    """
    ends_H = batch.response_lengths_H.cumsum(0)
    sample_N = torch.searchsorted(ends_H, index_N, right=True)
    place_N = index_N - (ends_H - batch.response_lengths_H)[sample_N]
    seed_B = batch.versions_B * 0x9E3779B1 + batch.sample_ids_B
    if batch.sequence_B is not None:
        seed_B = seed_B + batch.sequence_B * 0x85EBCA6B
    seed_H = batch.of_held(seed_B)
    key_N = ((seed_H[sample_N] << 24) + place_N) & 0x7FFFFFFFFFFFFFFF
    for shift in (31, 29):  # the rounds of splitmix64 (Steele et al. 2014), product modulo 2^63
        key_N = (key_N ^ (key_N >> shift)) * 0x3F58476D1CE4E5B9 & 0x7FFFFFFFFFFFFFFF
    return key_N ^ (key_N >> 32)


def _group_sum(value_B: Tensor, group_B: Tensor) -> Tensor:
    _, index_B = group_B.unique(return_inverse=True)
    return torch.bincount(index_B, value_B)[index_B]


def _group_member(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Returns, for each sample, the value of one member of its group, the same for the group."""
    _, index_B = group_B.unique(return_inverse=True)
    value_G = torch.zeros(int(index_B.max()) + 1, dtype=value_B.dtype)
    value_G[index_B] = value_B
    return value_G[index_B]


def whiten(values_B: Tensor, counts_B: Tensor | None = None) -> Tensor:
    """Scales samples' values to mean 0 and standard deviation (n - 1) 1.

    `counts_B` is how often each value counts, such as the response length; None for once.
    """
    num = len(values_B) if counts_B is None else int(counts_B.sum())
    weight_B = 1 if counts_B is None else counts_B
    centred_B = values_B - (values_B * weight_B).sum() / num
    return _divided_by_std(centred_B, (centred_B.square() * weight_B).sum(), num)


def whiten_tokens(values_R: Tensor, over: OverTokens) -> Tensor:
    """Scales values in place to mean 0 and standard deviation (n - 1) 1 over all ranks' tokens."""
    centred_R = values_R.sub_(over.means(values_R))
    return _divided_by_std(centred_R, over.totals(centred_R.square())[0], over.num)


def _divided_by_std(centred_N: Tensor, squares: Tensor, num: int) -> Tensor:
    return centred_N.div_((squares / max(num - 1, 1)).sqrt() + 1e-8)


def response_values(column_T: Tensor, batch: RolloutBatch) -> Tensor:
    """Returns a column's values at response tokens: (R,), in the column's dtype."""
    return torch.from_numpy(column_T.numpy()[batch.response_mask_T.numpy()])


def response_column(values_R: Tensor, batch: TrainBatch) -> Tensor:
    """Returns a column with the values at response tokens, zero at others: (T,) float32."""
    column_T = torch.zeros(batch.num_tokens)
    column_T.numpy()[batch.response_mask_T.numpy()] = values_R.numpy()
    return column_T


def sample_column(value_B: Tensor, batch: TrainBatch) -> Tensor:
    """Returns each sample's value at all its response tokens, zero at others: (T,) float32."""
    column_T = repeated(batch.of_held(value_B).float(), batch.lengths_H)
    column_T.numpy()[~batch.response_mask_T.numpy()] = 0
    return column_T


def repeated(value_B: Tensor, lengths_B: Tensor) -> Tensor:
    return torch.from_numpy(np.repeat(value_B.numpy(), lengths_B.numpy()))
