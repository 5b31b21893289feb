"""Distillation: learns from a teacher's log-probabilities.

`OnPolicyDistillation` uses policy gradients; the reward of each sampled token depends on the
teacher's log-probability of the token. `Distillation` learns the teacher's distributions, on
responses from the data or on samples.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.advantage import (
    divided_by_group_std,
    gae,
    minus_group_mean,
    repeated,
    response_column,
    response_values,
)
from hybridrl.algorithms.base import LossOutput, num_response_tokens
from hybridrl.algorithms.over_tokens import OverTokens
from hybridrl.algorithms.policy_gradient import PolicyGradient
from hybridrl.config.algorithm import OnPolicyDistillationConfig
from hybridrl.config.distillation import DistillationConfig, GkdConfig
from hybridrl.contracts.batch import MicroBatch, TrainBatch

# Lower bound on the total probability 1 - sum(p) of the tokens outside the top k. Smaller values of
# this fp32 difference are only rounding errors.
MIN_REST = 1e-6


class OnPolicyDistillation(PolicyGradient[OnPolicyDistillationConfig]):
    """Reverse KL to the teacher on the policy's own responses (Lu 2025,
    thinkingmachines.ai/blog/on-policy-distillation; Agarwal et al. 2023, GKD, arXiv 2306.13649).

    A token's reward is log p_teacher - log p_old. This is the single-step part of MiniLLM's
    gradient for the sampled token (Gu et al. 2023, arXiv 2306.08543, sec. 2.2). With gamma = 1 the
    long-term part is included, and the result is the gradient of the KL over whole responses.
    GRPO's advantage times `reward_coef` is added.
    """

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Returns discounted sums of token rewards, plus the weighted group-relative advantage."""
        config, lengths_H = self.config, batch.response_lengths_H
        token_rewards_T = -self._reverse_kl(batch)
        if (penalty_T := self.kl_penalty(batch)) is not None:
            token_rewards_T = token_rewards_T - penalty_T
        rewards_R = response_values(token_rewards_T, batch)
        # With lambda 1 and all values 0, GAE is the discounted sum of rewards.
        advantages_R, _ = gae(
            rewards_R, torch.zeros_like(rewards_R), lengths_H, config.gamma, lam=1.0
        )
        if config.reward_coef > 0:
            samples = batch.by_sample()
            centred_B = minus_group_mean(self.rewards(samples), samples.group_B)
            compared_B = divided_by_group_std(centred_B, samples.group_B)
            compared_H = batch.of_held(batch.sequences.of_sequences(compared_B))
            advantages_R += config.reward_coef * repeated(compared_H, lengths_H)
        return self.with_columns(batch, advantages_T=response_column(advantages_R, batch))

    def after_step(self, batch: TrainBatch) -> dict[str, float]:
        """Also returns `teacher/reverse_kl` at the start of the step, in nats per token."""
        reverse_kl = float(OverTokens(batch).means(response_values(self._reverse_kl(batch), batch)))
        return {"teacher/reverse_kl": reverse_kl, **super().after_step(batch)}

    def _reverse_kl(self, batch: TrainBatch) -> Tensor:
        """Returns log p_old - log p_teacher of each token: (T,) float64."""
        old_T = batch.require("old_logp_T", self.name).double()
        return old_T - batch.require("teacher_logp_T", self.name).double()


class Distillation:
    """Forward KL from the teacher to the policy, averaged over response tokens (Hinton et al. 2015,
    arXiv 1503.02531; on sampled responses this is GKD, Agarwal et al. 2023, arXiv 2306.13649).

    Each distribution is reduced to the teacher's k most likely tokens and one outcome for all other
    tokens: sum_k p_k (log p_k - log q_k) + p_rest (log p_rest - log q_rest), p_rest = 1 - sum_k
    p_k. This is a KL and never exceeds the KL of the full distributions; it and its gradient are 0
    if policy and teacher agree. If the term for the other tokens were left out, or p were
    renormalised to sum to 1, the loss would push the probability of all other tokens to 0.
    """

    def __init__(self, config: DistillationConfig | GkdConfig) -> None:
        self.config = config
        self.name = config.name
        self.needs = config.needs

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch unchanged: the loss uses the teacher's distributions directly."""
        return batch

    def denominator(self, batch: TrainBatch) -> float:
        return num_response_tokens(batch)

    def loss(
        self, logp_SK: Tensor, entropy_S: Tensor, micro: MicroBatch, denominator: float
    ) -> LossOutput:
        """Returns the KL. Arguments as in `Algorithm.loss`, for the teacher's tokens."""
        mask_S = micro.loss_mask_S
        logp_SK = logp_SK.masked_fill(~mask_S[:, None], 0.0)
        teacher_SK = micro.require("teacher_logp_SK", self.name)
        # At masked positions both log-probabilities are 0, so every term is 0 there.
        kl_S, mass_S = forward_kl(teacher_SK, logp_SK)
        metrics = {
            "policy/entropy": entropy_S.detach().masked_fill(~mask_S, 0.0).sum(),
            "teacher/forward_kl": kl_S.detach().sum(),
            "teacher/top_mass": mass_S.masked_fill(~mask_S, 0.0).sum(),
        }
        return LossOutput(kl_S.sum() / denominator, metrics)


def forward_kl(teacher_SK: Tensor, logp_SK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns KL(teacher, policy) over K distinct tokens and the rest, in nats, and sum p_K: (S,).

    Both arguments are log-probabilities of the same tokens.
    """
    p_SK = teacher_SK.exp()
    mass_S, top_S = p_SK.sum(-1), (p_SK * (teacher_SK - logp_SK)).sum(-1)
    rest_S, policy_rest_S = _rest(mass_S), _rest(logp_SK.exp().sum(-1))
    return top_S + rest_S * (rest_S.log() - policy_rest_S.log()), mass_S


def _rest(mass_S: Tensor) -> Tensor:
    return (1 - mass_S).clamp(min=MIN_REST)
