"""Proximal policy optimization (Schulman et al. 2017, arXiv 1707.06347), a token an action.

Advantages are by GAE from a critic's values; the reward stands on the last token. Both losses are
means over response tokens of the mini-batch, as `aggregate` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.advantage import (
    gae,
    last_token_rewards,
    length_lambda,
    response_column,
    response_values,
    sample_column,
    whiten_tokens,
)
from hybridrl.algorithms.base import LossOutput
from hybridrl.algorithms.over_tokens import OverTokens
from hybridrl.algorithms.policy_gradient import PolicyGradient
from hybridrl.config.schema import PpoConfig
from hybridrl.contracts.batch import MicroBatch, Producer, TrainBatch


class Ppo(PolicyGradient):
    """Trains a policy and a critic.

    The KL to the reference is a penalty a token in the reward (`kl_in: reward`), which the critic
    learns too, or a term of the policy's loss (`kl_in: loss`).
    """

    def __init__(self, config: PpoConfig) -> None:
        super().__init__(config)
        self.config = config

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Fills the advantages (whitened over the batch if so set) and the critic's returns."""
        config, lengths_H = self.config, batch.response_lengths_H
        rewards_R = last_token_rewards(batch.of_held(self.rewards(batch)), lengths_H)
        if (penalty_T := self.kl_penalty(batch)) is not None:
            rewards_R = rewards_R - response_values(penalty_T, batch)
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
        return batch.join_columns(Producer.here(self.name), **columns)

    def own_term(self, logp_S: Tensor, old_S: Tensor, micro: MicroBatch) -> Tensor | None:
        """Returns the negative log-likelihood of samples that pass, weighted."""
        if self.config.positive_lm_coef == 0:
            return None
        return -micro.require("term_weights_S", self.name) * logp_S

    def _positive_weights(self, batch: TrainBatch) -> Tensor:
        """Returns the weights that make the loss's mean one over the samples that pass alone:
        (T,) float32, zero on the others.

        The positive example LM loss of VAPO (Yue et al. 2025, arXiv 2504.05118, eq. 9-10).
        """
        passed_B = batch.reward_B >= self.config.pass_reward
        # What the loss's denominator counts of a sample.
        counts_B = batch.response_lengths_B.double()
        if self.config.aggregate != "token_mean":
            counts_B = torch.ones_like(counts_B)
        scale = counts_B.sum() / counts_B[passed_B].sum().clamp(min=1)
        weight_B = self.config.positive_lm_coef * scale * passed_B
        return sample_column(weight_B, batch)

    def value_loss(self, values_S: Tensor, micro: MicroBatch, denominator: float) -> LossOutput:
        """Returns the clipped value loss; arguments as in `CriticAlgorithm.value_loss`."""
        if self.config.needs_whole_sequences:
            self._check_whole(micro)
        # Masked first, as in the policy's loss; the columns are zero there already.
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
    """Squared error of the critic, no better for moving a value further than `clip` from its old
    one.

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2: the value loss of the PPO
    authors' code (openai/baselines, ppo2; Huang et al. 2022, "The 37 implementation details of
    PPO", no. 9).

    Returns:
        The loss, and where the clipped term is the larger one, which has no gradient.
    """
    near_S = old_values_S + (values_S - old_values_S).clamp(-clip, clip)
    plain_S, clipped_S = (values_S - returns_S).square(), (near_S - returns_S).square()
    return torch.maximum(plain_S, clipped_S) / 2, clipped_S > plain_S
