"""Rewards to advantages, on the whole batch. Pure functions, float64 inside, CPU.

`R` is the number of response tokens of a batch: its samples' responses one after the other,
without the prompts; `batch.response_mask_T` picks them from a (T,) column.
"""

from __future__ import annotations

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


def gae(
    rewards_R: Tensor, values_R: Tensor, response_lengths_B: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv 1506.02438, eq. 16).

    A_t = sum over l >= 0 of (gamma lam)^l delta_{t+l}, with delta_t = r_t + gamma V(s_{t+1}) -
    V(s_t). The state after the last token is terminal: its value is 0.

    Args:
        rewards_R: reward of each response token.
        values_R: V(s_t), the value of the state that token t was sampled from.
        response_lengths_B: response tokens of each sample.
        gamma: discount a token.
        lam: lambda.

    Returns:
        Advantages and returns (advantage + value), each (R,) float64.
    """
    longest = int(response_lengths_B.max())
    sample_R = torch.repeat_interleave(response_lengths_B)
    starts_B = response_lengths_B.cumsum(0) - response_lengths_B
    # Time comes first, so that the loop walks over contiguous rows. Beyond the end of a response
    # rewards and values stay 0, and so do deltas and advantages: no mask is needed.
    place_R = (torch.arange(len(sample_R)) - starts_B[sample_R], sample_R)
    shape = (longest + 1, len(response_lengths_B))
    rewards_LB = torch.zeros(shape, dtype=torch.float64).index_put(place_R, rewards_R.double())
    values_LB = torch.zeros(shape, dtype=torch.float64).index_put(place_R, values_R.double())
    delta_LB = rewards_LB[:-1] + gamma * values_LB[1:] - values_LB[:-1]
    advantages_LB = torch.zeros(shape, dtype=torch.float64)
    for t in reversed(range(longest)):
        torch.add(delta_LB[t], advantages_LB[t + 1], alpha=gamma * lam, out=advantages_LB[t])
    advantages_R = advantages_LB[place_R]
    return advantages_R, advantages_R + values_R.double()


def group_normalised(
    reward_B: Tensor, group_B: Tensor, normalize_std: bool, epsilon: float = 1e-6
) -> Tensor:
    """Compares each reward with its group (GRPO, Shao et al. 2024, arXiv 2402.03300, sec. 4.1.2).

    Returns:
        (B,) float64: (r - mean) / (std + epsilon) with the mean and the sample standard deviation
        (n - 1) of the group; without the division if not `normalize_std`. A group of one gives 0.
    """
    _, index_B = group_B.unique(return_inverse=True)
    size_G = torch.bincount(index_B).double()
    zeros_G = torch.zeros_like(size_G)
    reward_B = reward_B.double()
    centred_B = reward_B - (zeros_G.index_add(0, index_B, reward_B) / size_G)[index_B]
    if not normalize_std:
        return centred_B
    square_G = zeros_G.index_add(0, index_B, centred_B.square())
    std_G = (square_G / (size_G - 1).clamp(min=1)).sqrt()
    return centred_B / (std_G[index_B] + epsilon)


def whiten(advantages_R: Tensor, epsilon: float = 1e-8) -> Tensor:
    """Scales to mean 0 and standard deviation (n - 1) 1 over all response tokens of the batch."""
    centred_R = advantages_R - advantages_R.mean()
    std = (centred_R.square().sum() / max(len(centred_R) - 1, 1)).sqrt()
    return centred_R / (std + epsilon)


def response_column(values_R: Tensor, batch: TrainBatch) -> Tensor:
    """Puts values of response tokens into a column: (T,) float32, zero on prompt tokens."""
    column_T = torch.zeros(batch.num_tokens)
    column_T[batch.response_mask_T] = values_R.float()
    return column_T
