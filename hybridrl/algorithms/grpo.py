"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300) and its relatives.

All compare the samples of one prompt and train no critic; `config.algorithm.PRESETS` holds what
each name changes. The loss of `grpo` is eq. 3 with the mean taken over all response tokens of the
mini-batch instead of over each sample's tokens first, so that a token counts the same in a short
and in a long response (Yu et al. 2025, arXiv 2503.14476, sec. 3.3).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from hybridrl.algorithms.advantage import (
    divided_by_group_std,
    informative_scale,
    leave_one_out,
    minus_group_mean,
    pass_at_k,
    response_column,
    token_keys,
    whiten,
    without_high_covariance,
)
from hybridrl.algorithms.policy_gradient import PolicyGradient
from hybridrl.batch import BatchError, Producer, TrainBatch
from hybridrl.config.schema import GrpoConfig


class Grpo(PolicyGradient):
    """Compares the samples of one prompt with each other; needs no critic.

    The KL to the reference is a term of the loss (`kl_in: loss`, as in the paper), or the sum
    over a sample's tokens is taken from its reward before the group is compared (`kl_in:
    reward`).
    """

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self.config = config
        if config.cov_clip_fraction > 0:
            self.needs = replace(self.needs, old_logps=True)

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Gives every response token of a sample the advantage of the sample.

        Raises:
            BatchError: a group has too few samples to be compared.
        """
        config = self.config
        self._check_groups(batch)
        reward_B = self.rewards(batch)
        if (penalty_T := self.kl_penalty(batch)) is not None:
            reward_B = reward_B - torch.zeros_like(reward_B).index_add(
                0, batch.sample_index_T, penalty_T
            )
        advantages_B = self._compared(reward_B, batch)
        if config.rescale_informative:
            advantages_B = advantages_B * informative_scale(reward_B, batch.group_B)
        if config.whiten_advantages:
            advantages_B = whiten(advantages_B, batch.response_lengths_B)
        advantages_T = advantages_B.float()[batch.sample_index_T] * batch.response_mask_T
        if config.cov_clip_fraction > 0:
            advantages_R = without_high_covariance(
                advantages_B.repeat_interleave(batch.response_lengths_B),
                batch.require("old_logp_T", self.name)[batch.response_mask_T].double(),
                token_keys(batch),
                config.cov_clip_fraction,
                config.cov_clip_low,
                config.cov_clip_high,
            )
            advantages_T = response_column(advantages_R, batch)
        return batch.join_columns(Producer.here(self.name), advantages_T=advantages_T)

    def _compared(self, reward_B: Tensor, batch: TrainBatch) -> Tensor:
        config, group_B = self.config, batch.group_B
        if config.baseline == "pass_at_k":
            is_passed_B = reward_B >= config.pass_reward
            return pass_at_k(is_passed_B, group_B, config.pass_k, config.normalize_std)
        if config.baseline == "leave_one_out":
            centred_B = leave_one_out(reward_B, group_B)
        elif config.baseline == "length_weighted":
            centred_B = minus_group_mean(reward_B, group_B, batch.response_lengths_B)
        else:
            centred_B = minus_group_mean(reward_B, group_B)
        return divided_by_group_std(centred_B, group_B) if config.normalize_std else centred_B

    def _check_groups(self, batch: TrainBatch) -> None:
        fewest = max(2, self.config.pass_k) if self.config.baseline == "pass_at_k" else 2
        groups, counts = batch.group_B.unique(return_counts=True)
        if (least := int(counts.min())) < fewest:
            group = int(groups[counts.argmin()])
            got = f"returned {least} sample{'s' * (least > 1)} for group {group}"
            expected = f"{fewest} or more, for {self.name}"
            remedy = "Raise steps.samples_per_prompt."
            raise BatchError(batch.producer, "group_B", got, expected, remedy)
