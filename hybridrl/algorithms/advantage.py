"""Rewards to advantages. Pure functions, float64 inside, CPU.

What is a sample's is known of all B samples of a step; what is a token's of the H samples on this
rank. `R` is the number of their response tokens: the responses one after the other, without the
prompts; `response_values` takes them from a (T,) column, `response_column` puts them there. Both go
through numpy, as other boolean indices and repetitions do: of a million tokens they take a third of
the time of torch's. Statistics over the tokens of all samples come from over_tokens.py.
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
"""Returns for each of these response tokens, by index, a number that looks random."""


def token_kl(batch: TrainBatch, estimator: KlEstimator, needed_by: str) -> Tensor:
    """Returns the estimated KL of the old policy to the reference at each token.

    Returns:
        (T,) float64, zero on prompt tokens.
    """
    old_T = batch.require("old_logp_T", needed_by).double()
    reference_T = batch.require("reference_logp_T", needed_by).double()
    return kl_estimate(old_T, reference_T, estimator) * batch.response_mask_T


def sequence_kl(batch: TrainBatch, needed_by: str) -> float:
    """Returns the KL of the old policy to the reference, nats a response: the mean over responses
    of the sum of k1 over their tokens.
    """
    kl_R = response_values(token_kl(batch, "k1", needed_by), batch)
    return float(OverTokens(batch).totals(kl_R)) / batch.num_samples


def last_token_rewards(reward_H: Tensor, response_lengths_H: Tensor) -> Tensor:
    """Puts each sample's reward on the last token of its response: (R,) float64, else zero."""
    rewards_R = torch.zeros(int(response_lengths_H.sum()), dtype=torch.float64)
    rewards_R[response_lengths_H.cumsum(0) - 1] = reward_H.double()
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
    response_lengths_H: Tensor,
    gamma: float,
    lam: float | Tensor,
    critic_lam: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    A_t = sum over l >= 0 of (gamma lam)^l delta_{t+l}, with delta_t = r_t + gamma V(s_{t+1}) -
    V(s_t). The state after the last token is terminal: its value is 0.

    Args:
        rewards_R: reward of each response token.
        values_R: V(s_t), the value of the state that token t was sampled from.
        response_lengths_H: response tokens of each sample.
        gamma: discount a token.
        lam: lambda, one number or one a sample.
        critic_lam: lambda of the returns; None: the same.

    Returns:
        Advantages and returns (advantage + value), each (R,) float64.
    """
    values_R = values_R.double()
    ends_H = response_lengths_H.cumsum(0)
    next_R = values_R.roll(-1)
    next_R[ends_H - 1] = 0.0
    delta_R = next_R.mul_(gamma).add_(rewards_R).sub_(values_R)
    advantages_R = _sum_to_come(delta_R, response_lengths_H, gamma * lam)
    if critic_lam is None:
        return advantages_R, advantages_R + values_R
    return advantages_R, _sum_to_come(delta_R, response_lengths_H, gamma * critic_lam) + values_R


def _sum_to_come(value_R: Tensor, lengths_B: Tensor, decay: float | Tensor) -> Tensor:
    """Returns at each token the sum over it and those behind it in its sample, what is l tokens
    behind multiplied by decay^l.
    """
    decay_B = torch.as_tensor(decay, dtype=torch.float64).expand(len(lengths_B))
    if not bool(decay_B.any()):  # also where this rank has no sample
        return value_R
    if bool((decay_B == 1).all()):
        total_R = value_R.cumsum(0)
        end_B = total_R[lengths_B.cumsum(0) - 1]
        return repeated(end_B, lengths_B).sub_(total_R).add_(value_R)
    is_in_BL = (torch.arange(int(lengths_B.max())) < lengths_B[:, None]).numpy()
    # Beyond the end of a response all is 0: the loop needs no mask. Time comes first in it, so
    # that it walks over contiguous rows.
    value_BL = torch.zeros(is_in_BL.shape, dtype=torch.float64)
    value_BL.numpy()[is_in_BL] = value_R.numpy()
    value_LB = value_BL.t().contiguous()
    rows = value_LB.unbind(0)
    for now_B, next_B in zip(rows[-2::-1], rows[:0:-1], strict=True):
        now_B.addcmul_(decay_B, next_B)
    return torch.from_numpy(value_BL.copy_(value_LB.t()).numpy()[is_in_BL])


def length_lambda(response_lengths_B: Tensor, alpha: float) -> Tensor:
    """Returns lambda = 1 - 1 / (alpha length) of each sample, 0 where that is negative.

    The length-adaptive GAE of VAPO (Yue et al. 2025, arXiv 2504.05118, eq. 5).
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
    # Less any one reward of the group first: equal rewards then give exactly 0, without rounding.
    reward_B = reward_B - _one_of_group(reward_B, group_B)
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

    Chen et al. 2025, arXiv 2508.10751, eq. 11-15 ("analytical derivation"): a set of k samples of
    the group is worth 1 if one of them passes, and a sample the mean over the sets that hold it.
    With n samples of which w are wrong, mean = 1 - C(w, k) / C(n, k) and std = sqrt(mean (1 -
    mean)) over all sets; a right sample is worth 1, a wrong one 1 - C(w - 1, k - 1) / C(n - 1,
    k - 1).

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


def uniform_groups(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Returns which samples are in groups whose values are all equal.

    Returns:
        (B,) bool; True in a group of one.
    """
    return ~_any_of_group(value_B != _one_of_group(value_B, group_B), group_B)


def zero_groups(advantages_B: Tensor, group_B: Tensor) -> Tensor:
    """Returns which samples are in groups whose advantages are all 0: (B,) bool."""
    return ~_any_of_group(advantages_B != 0, group_B)


def informative_scale(is_lost_B: Tensor) -> float:
    """Returns B / (B - M), M samples being in groups that teach nothing; 1 if all are.

    The accurate gradient estimation of GPG (Chu et al. 2025, arXiv 2504.02546, eq. 7-8).
    """
    num_informative = int((~is_lost_B).sum())
    return len(is_lost_B) / num_informative if num_informative else 1.0


def covariance(advantages_R: Tensor, logp_R: Tensor, over: OverTokens) -> Tensor:
    """Returns (logp - mean) (A - mean) of each token (Cui et al. 2025, arXiv 2505.22617, eq. 10),
    of the policy at the start of the step, so that all updates of a step, however they are cut into
    micro-batches, agree on it.
    """
    logp_mean, advantage_mean = over.means(logp_R, advantages_R)
    return (logp_R - logp_mean) * (advantages_R - advantage_mean)


def of_highest_covariance(
    advantages_R: Tensor, logp_R: Tensor, over: OverTokens, key: Keys, fraction: float
) -> Tensor:
    """Returns which tokens KL-Cov takes (eq. 13): the int(fraction N) of all N, one at least, of
    highest covariance; of those of equal covariance the ones with the smallest keys.
    """
    covariance_R, count = covariance(advantages_R, logp_R, over), max(int(fraction * over.num), 1)
    named = torch.arange(len(covariance_R))
    if len(named) > count:  # no token of lower covariance than this rank's first can be taken
        named = (covariance_R >= covariance_R.topk(count).values[-1]).nonzero()[:, 0]
    chosen_R = torch.zeros(len(covariance_R), dtype=torch.bool)
    chosen_R[named] = over.are_first(named, -covariance_R[named], key(named), count)
    return chosen_R


def without_high_covariance(
    advantages_R: Tensor,
    logp_R: Tensor,
    over: OverTokens,
    key: Keys,
    fraction: float,
    low: float,
    high: float,
) -> Tensor:
    """Takes the advantage, and so the gradient, from some tokens that would cost much entropy.

    Clip-Cov (Cui et al. 2025, arXiv 2505.22617, eq. 11-12): of the tokens with a covariance in
    [low, high], int(fraction N) of all N are drawn, one at least.

    Args:
        key: the tokens with the smallest keys are the ones drawn.
    """
    covariance_R = covariance(advantages_R, logp_R, over)
    named = ((covariance_R >= low) & (covariance_R <= high)).nonzero()[:, 0]
    count, alike = max(int(fraction * over.num), 1), torch.zeros(len(named), dtype=torch.float64)
    drawn = named[over.are_first(named, alike, key(named), count)]
    return advantages_R.index_fill(0, drawn, 0.0)


def token_keys(batch: TrainBatch, index_N: Tensor) -> Tensor:
    """Returns for each of these of the R response tokens a number that looks random: (N,) int64.

    It is made of the policy's version, the sample's number in the step and the token's place, so
    that it is the same on every rank, in any order of samples, and in a resumed run.
    """
    ends_H = batch.response_lengths_H.cumsum(0)
    sample_N = torch.searchsorted(ends_H, index_N, right=True)
    place_N = index_N - (ends_H - batch.response_lengths_H)[sample_N]
    seed_H = batch.of_held(batch.versions_B * 0x9E3779B1 + batch.sample_ids_B)
    key_N = ((seed_H[sample_N] << 24) + place_N) & 0x7FFFFFFFFFFFFFFF
    for shift in (31, 29):  # the rounds of splitmix64 (Steele et al. 2014), product modulo 2^63
        key_N = (key_N ^ (key_N >> shift)) * 0x3F58476D1CE4E5B9 & 0x7FFFFFFFFFFFFFFF
    return key_N ^ (key_N >> 32)


def _group_sum(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Returns for each sample the sum over its group."""
    _, index_B = group_B.unique(return_inverse=True)
    return torch.bincount(index_B, value_B)[index_B]


def _one_of_group(value_B: Tensor, group_B: Tensor) -> Tensor:
    """Returns for each sample the value of one sample of its group, the same for all of them."""
    _, index_B = group_B.unique(return_inverse=True)
    one_G = torch.zeros(int(index_B.max()) + 1, dtype=value_B.dtype)
    one_G[index_B] = value_B
    return one_G[index_B]


def _any_of_group(is_so_B: Tensor, group_B: Tensor) -> Tensor:
    return _group_sum(is_so_B.double(), group_B) > 0


def whiten(values_B: Tensor, counts_B: Tensor | None = None) -> Tensor:
    """Scales to mean 0 and standard deviation (n - 1) 1 over the samples.

    Args:
        values_B: one a sample.
        counts_B: how often each is counted: its number of tokens, as if each token had it; None:
            once.
    """
    num = len(values_B) if counts_B is None else int(counts_B.sum())
    weight_B = 1 if counts_B is None else counts_B
    centred_B = values_B - (values_B * weight_B).sum() / num
    return _divided(centred_B, (centred_B.square() * weight_B).sum(), num)


def whiten_tokens(values_R: Tensor, over: OverTokens) -> Tensor:
    """Scales, in place, to mean 0 and standard deviation (n - 1) 1 over the response tokens of all
    ranks.
    """
    centred_R = values_R.sub_(over.means(values_R))
    return _divided(centred_R, over.totals(centred_R.square())[0], over.num)


def _divided(centred_N: Tensor, squares: Tensor, num: int, epsilon: float = 1e-8) -> Tensor:
    return centred_N.div_((squares / max(num - 1, 1)).sqrt() + epsilon)


def response_values(column_T: Tensor, batch: RolloutBatch) -> Tensor:
    """Returns what a column has of response tokens: (R,), in the column's dtype."""
    return torch.from_numpy(column_T.numpy()[batch.response_mask_T.numpy()])


def response_column(values_R: Tensor, batch: TrainBatch) -> Tensor:
    """Puts values of response tokens into a column: (T,) float32, zero on prompt tokens."""
    column_T = torch.zeros(batch.num_tokens)
    column_T.numpy()[batch.response_mask_T.numpy()] = values_R.numpy()
    return column_T


def sample_column(value_B: Tensor, batch: TrainBatch) -> Tensor:
    """Gives every response token its sample's value: (T,) float32, zero on prompt tokens."""
    column_T = repeated(batch.of_held(value_B).float(), batch.lengths_H)
    column_T.numpy()[~batch.response_mask_T.numpy()] = 0
    return column_T


def repeated(value_B: Tensor, lengths_B: Tensor) -> Tensor:
    """Returns each value as often as `lengths_B` says."""
    return torch.from_numpy(np.repeat(value_B.numpy(), lengths_B.numpy()))
