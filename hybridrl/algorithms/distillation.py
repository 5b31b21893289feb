"""Distillation: learning from a teacher's log-probabilities.

On the policy's own samples, by policy gradients of what the teacher thinks of each token
(`OnPolicyDistillation`), or of whole distributions, on the data's responses or on samples
(`Distillation`).
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
from hybridrl.contracts.batch import MicroBatch, Producer, TrainBatch

# Probability that all other tokens together have at least: what fp32 log-probabilities leave of
# 1 - sum(p) is rounding below it.
LEAST_REST = 1e-6


class OnPolicyDistillation(PolicyGradient):
    """Reverse KL to the teacher on the policy's own responses (Lu 2025,
    thinkingmachines.ai/blog/on-policy-distillation; Agarwal et al. 2023, GKD, arXiv 2306.13649).

    A token earns log p_teacher - log p_old: the single-step part of MiniLLM's gradient, of the
    sampled token alone (Gu et al. 2023, arXiv 2306.08543, sec. 2.2). gamma 1 adds the long part,
    so that the gradient is that of the responses' KL. With `reward_coef` the advantage of GRPO is
    added, times that.
    """

    def __init__(self, config: OnPolicyDistillationConfig) -> None:
        super().__init__(config)
        self.config = config

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Fills the advantages: discounted sums of what each token earns, and the reward's."""
        config, lengths_H = self.config, batch.response_lengths_H
        earned_T = -self._gap(batch)
        if (penalty_T := self.kl_penalty(batch)) is not None:
            earned_T = earned_T - penalty_T
        earned_R = response_values(earned_T, batch)
        # GAE with lambda 1 and without values is the sum of what is to come.
        advantages_R, _ = gae(
            earned_R, torch.zeros_like(earned_R), lengths_H, config.gamma, lam=1.0
        )
        if config.reward_coef > 0:
            centred_B = minus_group_mean(self.rewards(batch), batch.group_B)
            compared_B = divided_by_group_std(centred_B, batch.group_B)
            advantages_R += config.reward_coef * repeated(batch.of_held(compared_B), lengths_H)
        column_T = response_column(advantages_R, batch)
        return batch.join_columns(Producer.here(self.name), advantages_T=column_T)

    def after_step(self, batch: TrainBatch) -> dict[str, float]:
        """Returns `teacher/reverse_kl`, nats a token, of the policy at the step's start, too."""
        reverse_kl = float(OverTokens(batch).means(response_values(self._gap(batch), batch)))
        return {"teacher/reverse_kl": reverse_kl, **super().after_step(batch)}

    def _gap(self, batch: TrainBatch) -> Tensor:
        """Returns log p_old - log p_teacher of each token, (T,) float64."""
        old_T = batch.require("old_logp_T", self.name).double()
        return old_T - batch.require("teacher_logp_T", self.name).double()


class Distillation:
    """Forward KL of the policy from the teacher, the mean over response tokens (Hinton et al. 2015,
    arXiv 1503.02531; on sampled responses GKD's, Agarwal et al. 2023, arXiv 2306.13649).

    Of each distribution the teacher's k likeliest tokens are looked at, and all the others as one
    outcome: sum_k p_k (log p_k - log q_k) + p_rest (log p_rest - log q_rest), p_rest = 1 - sum_k
    p_k. That is the KL of two distributions, at most that of the whole ones, and 0 with a gradient
    of 0 where the policy is the teacher. Without the rest, or with p made to sum to 1, it would not
    be: the policy would be pushed to give the other tokens nothing.
    """

    def __init__(self, config: DistillationConfig | GkdConfig) -> None:
        self.config = config
        self.name = config.name
        self.needs = config.needs

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch as it is: the teacher says what each token could have been."""
        return batch

    def denominator(self, batch: TrainBatch) -> float:
        """Returns the number of response tokens."""
        return num_response_tokens(batch)

    def loss(
        self, logp_SK: Tensor, entropy_S: Tensor, micro: MicroBatch, denominator: float
    ) -> LossOutput:
        """Returns the KL; arguments as in `Algorithm.loss`, `logp_SK` of the teacher's tokens."""
        mask_S = micro.loss_mask_S
        logp_SK = logp_SK.masked_fill(~mask_S[:, None], 0.0)
        teacher_SK = micro.require("teacher_logp_SK", self.name)
        # On other positions both are 0, and so is every term.
        kl_S, mass_S = forward_kl(teacher_SK, logp_SK)
        metrics = {
            "policy/entropy": entropy_S.detach().masked_fill(~mask_S, 0.0).sum(),
            "teacher/forward_kl": kl_S.detach().sum(),
            "teacher/top_mass": mass_S.masked_fill(~mask_S, 0.0).sum(),
        }
        return LossOutput(kl_S.sum() / denominator, metrics)


def forward_kl(teacher_SK: Tensor, logp_SK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns KL(teacher, policy) over K tokens and the rest, nats, and the probability that the
    teacher gives the K together, each (S,).

    Args:
        teacher_SK, logp_SK: log-probabilities of the same tokens, each once.
    """
    p_SK = teacher_SK.exp()
    mass_S, top_S = p_SK.sum(-1), (p_SK * (teacher_SK - logp_SK)).sum(-1)
    rest_S, policy_rest_S = _rest(mass_S), _rest(logp_SK.exp().sum(-1))
    return top_S + rest_S * (rest_S.log() - policy_rest_S.log()), mass_S


def _rest(mass_S: Tensor) -> Tensor:
    """Returns the probability of all other tokens, (S,)."""
    return (1 - mass_S).clamp(min=LEAST_REST)
