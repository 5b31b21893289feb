"""REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): PPO's loss, without a critic.

The advantage of a token is the reward to come, its KL penalties included, whitened over all
response tokens of the batch. The form with a baseline is a preset of grpo.py.
"""

from __future__ import annotations

import torch

from hybridrl.algorithms.advantage import (
    gae,
    last_token_rewards,
    response_column,
    response_values,
    whiten,
)
from hybridrl.algorithms.policy_gradient import PolicyGradient
from hybridrl.batch import Producer, TrainBatch
from hybridrl.config.algorithm import ReinforceConfig


class ReinforcePlusPlus(PolicyGradient):
    """Compares each sample with the whole batch; one sample a prompt is enough."""

    def __init__(self, config: ReinforceConfig) -> None:
        super().__init__(config)
        self.config = config

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Fills the advantages: whitened discounted sums of the rewards to come."""
        lengths_B = batch.response_lengths_B
        rewards_R = last_token_rewards(self.rewards(batch), lengths_B)
        if (penalty_T := self.kl_penalty(batch)) is not None:
            rewards_R = rewards_R - response_values(penalty_T, batch)
        # GAE with lambda 1 and without values is the sum of the rewards to come.
        returns_R, _ = gae(
            rewards_R, torch.zeros_like(rewards_R), lengths_B, self.config.gamma, lam=1.0
        )
        return batch.join_columns(
            Producer.here(self.name), advantages_T=response_column(whiten(returns_R), batch)
        )
