"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347), a token an action.

Advantages are by GAE from a critic's values; the reward stands on the last token. Both losses are
means over all response tokens of the mini-batch.
"""

from __future__ import annotations

from torch import Tensor

from hybridrl.algorithms.advantage import (
    gae,
    last_token_rewards,
    response_column,
    token_kl,
    whiten,
)
from hybridrl.algorithms.base import LossOutput, Needs, num_response_tokens
from hybridrl.algorithms.surrogate import PolicyLoss, clipped_value_loss
from hybridrl.batch import MicroBatch, Producer, TrainBatch
from hybridrl.config.schema import PpoConfig


class Ppo:
    """Trains a policy and a critic.

    The KL to the reference is a penalty a token in the reward (`kl_in: reward`), which the critic
    learns too, or a term of the policy's loss (`kl_in: loss`).
    """

    name = "ppo"

    def __init__(self, config: PpoConfig) -> None:
        self.config = config
        self._kl_in_reward = config.kl_coef > 0 and config.kl_in == "reward"
        self.needs = Needs(reference=config.kl_coef > 0, values=True, old_logps=self._kl_in_reward)
        self._policy_loss = PolicyLoss(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
            kl_estimator=config.kl_estimator,
            entropy_coef=config.entropy_coef,
            needed_by=self.name,
        )

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Fills the advantages (whitened over the batch if so set) and the critic's returns."""
        mask_T = batch.response_mask_T
        rewards_R = last_token_rewards(batch.reward_B, batch.response_lengths_B)
        if self._kl_in_reward:
            kl_T = token_kl(batch, self.config.kl_estimator, self.name)
            rewards_R = rewards_R - self.config.kl_coef * kl_T[mask_T]
        values_R = batch.require("values_T", self.name)[mask_T]
        advantages_R, returns_R = gae(
            rewards_R,
            values_R,
            batch.response_lengths_B,
            self.config.gamma,
            self.config.gae_lambda,
        )
        if self.config.whiten_advantages:
            advantages_R = whiten(advantages_R)
        return batch.join_columns(
            Producer.here(self.name),
            advantages_T=response_column(advantages_R, batch),
            returns_T=response_column(returns_R, batch),
        )

    def denominator(self, batch: TrainBatch) -> float:
        """Returns the number of response tokens."""
        return num_response_tokens(batch)

    def loss(
        self, logp_S: Tensor, entropy_S: Tensor, micro: MicroBatch, denominator: float
    ) -> LossOutput:
        """Returns the clipped surrogate loss; arguments as in `Algorithm.loss`."""
        return self._policy_loss(logp_S, entropy_S, micro, denominator)

    def value_loss(self, values_S: Tensor, micro: MicroBatch, denominator: float) -> LossOutput:
        """Returns the clipped value loss; arguments as in `CriticAlgorithm.value_loss`."""
        # Masked first, as in PolicyLoss; the columns are zero there already.
        loss_S, clipped_S = clipped_value_loss(
            values_S.masked_fill(~micro.loss_mask_S, 0.0),
            micro.require("values_S", self.name),
            micro.require("returns_S", self.name),
            self.config.value_clip,
        )
        metrics = {"critic/clip_fraction": clipped_S.sum()}
        return LossOutput(loss_S.sum() / denominator, metrics)
