"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): PPO's loss without a critic.

A token's advantage is the discounted sum of the rewards from this token on, including KL penalties,
whitened over all response tokens of the batch. The variant with a baseline is a preset of GRPO
(grpo.py).
"""

from __future__ import annotations

import torch

from hybridrl.algorithms.advantage import gae, response_column, whiten_tokens
from hybridrl.algorithms.over_tokens import OverTokens
from hybridrl.algorithms.policy_gradient import PolicyGradient
from hybridrl.config.algorithm import ReinforceConfig
from hybridrl.contracts.batch import TrainBatch


class ReinforcePlusPlus(PolicyGradient[ReinforceConfig]):
    """Compares each sample with the whole batch, so one sample per prompt is enough."""

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        rewards_R = self.token_rewards(batch)
        # With lambda 1 and all values 0, GAE is the discounted sum of rewards.
        lengths_H, values_R = batch.response_lengths_H, torch.zeros_like(rewards_R)
        returns_R, _ = gae(rewards_R, values_R, lengths_H, self.config.gamma, lam=1.0)
        advantages_R = whiten_tokens(returns_R, OverTokens(batch))
        return self.with_columns(batch, advantages_T=response_column(advantages_R, batch))
