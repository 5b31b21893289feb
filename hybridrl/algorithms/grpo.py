"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300).

The loss is eq. 3 with the mean taken over all response tokens of the mini-batch instead of over
each sample's tokens first, so that a token counts the same in a short and in a long response (Yu
et al. 2025, arXiv 2503.14476, sec. 3.3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.advantage import group_normalised, token_kl
from hybridrl.algorithms.base import LossOutput, Needs, num_response_tokens
from hybridrl.algorithms.surrogate import PolicyLoss
from hybridrl.batch import BatchError, MicroBatch, Producer, TrainBatch
from hybridrl.config.schema import GrpoConfig


class Grpo:
    """Compares the samples of one prompt with each other; needs no critic.

    The KL to the reference is a term of the loss (`kl_in: loss`, as in the paper), or the sum
    over a sample's tokens is taken from its reward before the group is compared (`kl_in:
    reward`).
    """

    name = "grpo"

    def __init__(self, config: GrpoConfig) -> None:
        self.config = config
        self._kl_in_reward = config.kl_coef > 0 and config.kl_in == "reward"
        self.needs = Needs(reference=config.kl_coef > 0, old_logps=self._kl_in_reward)
        self._policy_loss = PolicyLoss(
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            kl_coef=config.kl_coef if config.kl_in == "loss" else 0.0,
            kl_estimator=config.kl_estimator,
            entropy_coef=config.entropy_coef,
            needed_by=self.name,
        )

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Gives every response token of a sample the sample's normalised reward.

        Raises:
            BatchError: a group has one sample, which cannot be compared with anything.
        """
        groups, counts = batch.group_B.unique(return_counts=True)
        if int(counts.min()) < 2:
            got = f"returned 1 sample for group {int(groups[counts.argmin()])}"
            remedy = "Raise steps.samples_per_prompt."
            raise BatchError(batch.producer, "group_B", got, "2 or more, for grpo", remedy)
        reward_B = batch.reward_B.double()
        if self._kl_in_reward:
            kl_T = token_kl(batch, self.config.kl_estimator, self.name)
            kl_B = torch.zeros_like(reward_B).index_add(0, batch.sample_index_T, kl_T)
            reward_B = reward_B - self.config.kl_coef * kl_B
        advantages_B = group_normalised(reward_B, batch.group_B, self.config.normalize_std)
        advantages_T = advantages_B.float()[batch.sample_index_T] * batch.response_mask_T
        return batch.join_columns(Producer.here(self.name), advantages_T=advantages_T)

    def denominator(self, batch: TrainBatch) -> float:
        """Returns the number of response tokens."""
        return num_response_tokens(batch)

    def loss(
        self, logp_S: Tensor, entropy_S: Tensor, micro: MicroBatch, denominator: float
    ) -> LossOutput:
        """Returns the clipped surrogate loss; arguments as in `Algorithm.loss`."""
        return self._policy_loss(logp_S, entropy_S, micro, denominator)
