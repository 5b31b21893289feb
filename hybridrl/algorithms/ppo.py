"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347) with tokens as actions.

Advantages are computed with GAE from a critic's values; the reward is given at the last token. Both
losses are averaged over the mini-batch according to `aggregate`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.advantage import (
    gae,
    length_lambda,
    response_column,
    response_values,
    sample_column,
    whiten_tokens,
)
from hybridrl.algorithms.base import LossOutput
from hybridrl.algorithms.over_tokens import OverTokens
from hybridrl.algorithms.policy_gradient import PolicyGradient
from hybridrl.config.algorithm import ReinforceConfig
from hybridrl.config.schema import PpoConfig
from hybridrl.contracts.batch import MicroBatch, TrainBatch


class Ppo(PolicyGradient[PpoConfig]):
    """Trains a policy and a critic.

    With `kl_in: reward` the KL to the reference is subtracted from each token's reward, so the
    critic learns to predict it too. With `kl_in: loss` the KL is a term of the policy's loss.
    """

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Computes the advantages, whitened if configured, and the returns for the critic."""
        config, lengths_H = self.config, batch.response_lengths_H
        rewards_R = self.token_rewards(batch)
        values_R = response_values(batch.require("values_T", self.name), batch)
        lam: float | Tensor = config.gae_lambda
        if config.gae_length_alpha is not None:
            lam = length_lambda(lengths_H, config.gae_length_alpha)
        advantages_R, returns_R = gae(
            rewards_R, values_R, lengths_H, config.gamma, lam, config.critic_gae_lambda
        )
        if config.whiten_advantages:
            advantages_R = whiten_tokens(advantages_R, OverTokens(batch))
        columns = {
            "advantages_T": response_column(advantages_R, batch),
            "returns_T": response_column(returns_R, batch),
        }
        if config.positive_lm_coef > 0:
            columns["term_weights_T"] = self._positive_weights(batch)
        return self.with_columns(batch, **columns)

    def own_term(self, logp_S: Tensor, old_S: Tensor, micro: MicroBatch) -> Tensor | None:
        """Returns the weighted negative log-likelihood of samples that pass."""
        if self.config.positive_lm_coef == 0:
            return None
        return -micro.require("term_weights_S", self.name) * logp_S

    def _positive_weights(self, batch: TrainBatch) -> Tensor:
        """Returns weights for a mean over the tokens of samples that pass: (T,) float32, else zero.
        Used in VAPO's positive example LM loss (Yue et al. 2025, arXiv 2504.05118, eq. 9-10).
        """
        samples = batch.by_sample()
        passed_B = samples.reward_B >= self.config.pass_reward
        # Each sample's contribution to the denominator.
        counts_B = samples.response_lengths_B.double()
        if self.config.aggregate != "token_mean":
            counts_B = torch.ones_like(counts_B)
        scale = counts_B.sum() / counts_B[passed_B].sum().clamp(min=1)
        weight_B = self.config.positive_lm_coef * scale * passed_B
        return sample_column(batch.sequences.of_sequences(weight_B), batch)

    def value_loss(self, values_S: Tensor, micro: MicroBatch, denominator: float) -> LossOutput:
        """Returns the clipped value loss; arguments as in `CriticAlgorithm.value_loss`."""
        if self.config.needs_whole_sequences:
            self._check_whole(micro)
        # Mask first, as in the policy's loss; the columns are already zero at masked positions.
        loss_S, clipped_S = clipped_value_loss(
            values_S.masked_fill(~micro.loss_mask_S, 0.0),
            micro.require("values_S", self.name),
            micro.require("returns_S", self.name),
            self.config.value_clip,
        )
        metrics = {"critic/clip_fraction": clipped_S.sum()}
        return LossOutput(self.weighted(loss_S, micro).sum() / denominator, metrics)


def clipped_value_loss(
    values_S: Tensor, old_values_S: Tensor, returns_S: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    """Returns the clipped value loss, and a mask of the positions where it has no gradient.

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2 (openai/baselines, ppo2; Huang
    et al. 2022, "The 37 implementation details of PPO", no. 9).
    """
    near_S = old_values_S + (values_S - old_values_S).clamp(-clip, clip)
    plain_S, clipped_S = (values_S - returns_S).square(), (near_S - returns_S).square()
    return torch.maximum(plain_S, clipped_S) / 2, clipped_S > plain_S


class ReinforcePlusPlus(PolicyGradient[ReinforceConfig]):
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): PPO's loss without a critic.

    A token's advantage is the discounted sum of the rewards from this token on, with KL penalties,
    whitened over all response tokens of the batch, so one sample per prompt is enough. The variant
    with a baseline is a preset of GRPO (grpo.py).
    """

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        rewards_R = self.token_rewards(batch)
        # With lambda 1 and all values 0, GAE is the discounted sum of rewards.
        lengths_H, values_R = batch.response_lengths_H, torch.zeros_like(rewards_R)
        returns_R, _ = gae(rewards_R, values_R, lengths_H, self.config.gamma, lam=1.0)
        advantages_R = whiten_tokens(returns_R, OverTokens(batch))
        return self.with_columns(batch, advantages_T=response_column(advantages_R, batch))
