"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300) and its relatives.

All compare the samples of one prompt and train no critic; `config.algorithm.PRESETS` holds what
each name changes. The loss of `grpo` is eq. 3 with the mean taken over all response tokens of the
mini-batch instead of over each sample's tokens first, so that a token counts the same in a short
and in a long response (Yu et al. 2025, arXiv 2503.14476, sec. 3.3).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hybridrl.algorithms.advantage import (
    divided_by_group_std,
    informative_scale,
    leave_one_out,
    minus_group_mean,
    of_highest_covariance,
    pass_at_k,
    repeated,
    response_column,
    response_values,
    sample_column,
    token_keys,
    whiten,
    without_high_covariance,
    zero_groups,
)
from hybridrl.algorithms.over_tokens import OverTokens
from hybridrl.algorithms.policy_gradient import PolicyGradient
from hybridrl.config.schema import GrpoConfig
from hybridrl.contracts.batch import (
    GREEDY,
    BatchError,
    MicroBatch,
    Producer,
    ScoredBatch,
    TrainBatch,
)


class Grpo(PolicyGradient):
    """Compares the samples of one prompt with each other; needs no critic.

    The KL to the reference is a term of the loss (`kl_in: loss`, as in the paper), or the sum
    over a sample's tokens is taken from its reward before the group is compared (`kl_in:
    reward`).
    """

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self.config = config

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Gives every response token of a sample the advantage of the sample.

        Raises:
            BatchError: a group has too few samples to be compared.
        """
        config, reward_B = self.config, self.rewards(batch)
        if (penalty_T := self.kl_penalty(batch)) is not None:
            penalty_R = response_values(penalty_T, batch)
            reward_B = reward_B - OverTokens(batch).sums(penalty_R)[:, 0]
        advantages_B = self._within_groups(reward_B, batch)
        if config.rescale_informative:
            # By rewards before the KL, which differs between samples of equal rewards too.
            advantages_B = advantages_B * informative_scale(self.uninformative(batch))
        if config.whiten_advantages:
            # REINFORCE++ counts tokens (arXiv 2501.03262, eq. 5), GDPO samples (eq. 6).
            counts_B = None if config.normalize_parts else batch.response_lengths_B
            advantages_B = whiten(advantages_B, counts_B)
        columns = {"advantages_T": sample_column(advantages_B, batch)}
        if self.config.finds_covariance:
            columns |= self._of_covariance(advantages_B, batch)
        return batch.join_columns(Producer.here(self.name), **columns)

    def own_term(self, logp_S: Tensor, old_S: Tensor, micro: MicroBatch) -> Tensor | None:
        """Returns what KL-Cov's tokens pay for moving: the weighted |logp - old_logp|, as in the
        authors' code.
        """
        if self.config.cov_kl_fraction == 0:
            return None
        return micro.require("term_weights_S", self.name) * (logp_S - old_S).abs()

    @property
    def max_resampling(self) -> int:
        """Rounds in which uninformative groups are replaced."""
        return self.config.max_resampling

    def uninformative(self, batch: ScoredBatch) -> Tensor:
        """Returns which samples are in groups whose advantages are all 0: (B,) bool. Decided before
        the KL, which is no reward, and before what scales the whole batch.

        Raises:
            BatchError: as of `advantages`.
        """
        return zero_groups(self._within_groups(self.rewards(batch), batch), batch.group_B)

    def _within_groups(self, reward_B: Tensor, batch: ScoredBatch) -> Tensor:
        """Returns what each sample's reward is worth beside the others of its group: (B,)."""
        self._check_groups(batch)
        if self.config.normalize_parts:
            return self._compared_parts(batch)
        return self._compared(reward_B, batch)

    def _of_covariance(self, advantages_B: Tensor, batch: TrainBatch) -> dict[str, Tensor]:
        """Returns the columns that depend on the covariance of advantage and log-probability."""
        config, over = self.config, OverTokens(batch)
        advantages_R = repeated(batch.of_held(advantages_B), batch.response_lengths_H)
        old_R = response_values(batch.require("old_logp_T", self.name), batch).double()
        keys = partial(token_keys, batch)
        if config.cov_kl_fraction > 0:
            fraction = config.cov_kl_fraction
            chosen_R = of_highest_covariance(advantages_R, old_R, over, keys, fraction)
            return {"term_weights_T": response_column(config.cov_kl_coef * chosen_R, batch)}
        low, high = config.cov_clip_low, config.cov_clip_high
        kept_R = without_high_covariance(
            advantages_R, old_R, over, keys, config.cov_clip_fraction, low, high
        )
        return {"advantages_T": response_column(kept_R, batch)}

    def _compared_parts(self, batch: ScoredBatch) -> Tensor:
        """Compares every part of the reward by itself, and adds (GDPO, Liu et al. 2026, arXiv
        2601.05242, eq. 4, 5 and 7).
        """
        total_B = torch.zeros(batch.num_samples, dtype=torch.float64)
        for name, part_B in self._parts(batch).items():
            total_B += self.config.part_weights.get(name, 1.0) * self._compared(
                part_B.double(), batch
            )
        return total_B

    def _parts(self, batch: ScoredBatch) -> dict[str, Tensor]:
        """Returns the parts that are compared, by name."""
        # The greedy response's is the same for a group, and not this algorithm's.
        found = {name: part_B for name, part_B in batch.reward_parts.items() if name != GREEDY}
        wanted = self.config.part_weights
        unknown = sorted(set(wanted) - set(found))
        if unknown or not found:
            got = f"returned no part {unknown[0]!r}" if unknown else "returned no parts"
            allowed = ", ".join(sorted(found)) or "one part or more"
            remedy = "Name only such parts in algorithm.part_weights, or add one to the reward."
            raise BatchError(batch.producer, "reward_parts", got, allowed, remedy)
        return {name: found[name] for name in wanted or found}

    def _compared(self, reward_B: Tensor, batch: ScoredBatch) -> Tensor:
        config, group_B = self.config, batch.group_B
        if config.baseline == "pass_at_k":
            is_passed_B = reward_B >= config.pass_reward
            return pass_at_k(is_passed_B, group_B, config.pass_k, config.normalize_std)
        if config.baseline == "greedy":
            return reward_B - self._greedy(batch)
        if config.baseline == "leave_one_out":
            centred_B = leave_one_out(reward_B, group_B)
        elif config.baseline == "length_weighted":
            centred_B = minus_group_mean(reward_B, group_B, batch.response_lengths_B)
        else:
            centred_B = minus_group_mean(reward_B, group_B)
        return divided_by_group_std(centred_B, group_B) if config.normalize_std else centred_B

    def _greedy(self, batch: ScoredBatch) -> Tensor:
        """Returns the reward of the greedy response to each prompt (ReMax, Li et al. 2023, arXiv
        2310.10505): (B,) float64.
        """
        if GREEDY not in batch.reward_parts:
            got = f"returned a batch without the part {GREEDY!r}"
            expected = f"the reward of a greedy response to each prompt, for {self.name}"
            remedy = "Call sampler.generate(prompts, greedy=True)."
            raise BatchError(batch.producer, "reward_parts", got, expected, remedy)
        return batch.reward_parts[GREEDY].double()

    def _check_groups(self, batch: ScoredBatch) -> None:
        fewest = self.config.min_samples
        groups, counts = batch.group_B.unique(return_counts=True)
        if (least := int(counts.min())) < fewest:
            group = int(groups[counts.argmin()])
            got = f"returned {least} sample{'s' * (least > 1)} for group {group}"
            expected = f"{fewest} or more, for {self.name}"
            remedy = "Raise steps.samples_per_prompt."
            raise BatchError(batch.producer, "group_B", got, expected, remedy)
