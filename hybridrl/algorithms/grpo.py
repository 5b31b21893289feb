"""Group relative policy optimization (Shao et al. 2024, arXiv 2402.03300) and its variants.

All variants compare the samples of a prompt with each other and train no critic. The settings of
each variant are in `config.presets.PRESETS`. The loss of `grpo` is the paper's eq. 3, except that
it is averaged over all response tokens of the mini-batch instead of first over the tokens of each
sample. A token therefore counts the same in short and in long responses (Yu et al. 2025, arXiv
2503.14476, sec. 3.3).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hybridrl.algorithms.advantage import (
    clip_cov_advantages,
    divided_by_group_std,
    informative_scale,
    kl_cov_mask,
    leave_one_out,
    minus_group_mean,
    pass_at_k,
    repeated,
    response_column,
    response_values,
    sample_column,
    token_keys,
    whiten,
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
    SampleValues,
    ScoredBatch,
    TrainBatch,
)


class Grpo(PolicyGradient[GrpoConfig]):
    """Compares the samples of each prompt with each other, without a critic.

    With `kl_in: loss` the KL to the reference is a term of the loss, as in the paper. With `kl_in:
    reward` the KL summed over a sample is subtracted from its reward before samples are compared.
    """

    def __init__(self, config: GrpoConfig) -> None:
        super().__init__(config)
        self.max_resampling = config.max_resampling

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Gives response tokens their sample's advantage. Raises BatchError for small groups."""
        config, samples = self.config, batch.by_sample()
        reward_B = self.rewards(samples)
        if (penalty_T := self.kl_penalty(batch)) is not None:
            penalty_R = response_values(penalty_T, batch)
            reward_B = reward_B - batch.sequences.summed(OverTokens(batch).sums(penalty_R)[:, 0])
        advantages_B = self._within_groups(reward_B, samples, batch.producer)
        if config.rescale_informative:
            # Based on rewards without the KL, because the KL differs between samples with equal
            # rewards.
            is_uninformative_B = batch.sequences.of_samples(self.uninformative(batch))
            advantages_B = advantages_B * informative_scale(is_uninformative_B)
        if config.whiten_advantages:
            # REINFORCE++ whitens over tokens (arXiv 2501.03262, eq. 5), GDPO over samples (eq. 6).
            counts_B = None if config.normalize_parts else samples.response_lengths_B
            advantages_B = whiten(advantages_B, counts_B)
        advantages_B = batch.sequences.of_sequences(advantages_B)
        columns = {"advantages_T": sample_column(advantages_B, batch)}
        if config.finds_covariance:
            columns |= self._covariance_columns(advantages_B, batch)
        return self.with_columns(batch, **columns)

    def own_term(self, logp_S: Tensor, old_S: Tensor, micro: MicroBatch) -> Tensor | None:
        """Returns KL-Cov's weighted penalty |logp - old_logp|, as in the authors' code."""
        if self.config.cov_kl_fraction == 0:
            return None
        return micro.require("term_weights_S", self.name) * (logp_S - old_S).abs()

    def uninformative(self, batch: ScoredBatch) -> Tensor:
        """Returns a mask of the samples in groups whose advantages are all 0: (B,) bool.

        The KL in the reward and scaling over the whole batch are ignored.
        """
        samples = batch.by_sample()
        advantages_B = self._within_groups(self.rewards(samples), samples, batch.producer)
        return batch.sequences.of_sequences(zero_groups(advantages_B, samples.group_B))

    def _within_groups(self, reward_B: Tensor, samples: SampleValues, who: Producer) -> Tensor:
        """Returns each sample's advantage in its group: (B,) float64. Errors name `who`."""
        self._check_groups(samples, who)
        if self.config.normalize_parts:
            return self._compare_parts(samples, who)
        return self._compare(reward_B, samples, who)

    def _covariance_columns(self, advantages_B: Tensor, batch: TrainBatch) -> dict[str, Tensor]:
        """Returns a token column: the penalty weights of KL-Cov or the advantages of Clip-Cov."""
        config, over = self.config, OverTokens(batch)
        advantages_R = repeated(batch.of_held(advantages_B), batch.response_lengths_H)
        old_R = response_values(batch.require("old_logp_T", self.name), batch).double()
        keys = partial(token_keys, batch)
        if config.cov_kl_fraction > 0:
            fraction = config.cov_kl_fraction
            chosen_R = kl_cov_mask(advantages_R, old_R, over, keys, fraction)
            return {"term_weights_T": response_column(config.cov_kl_coef * chosen_R, batch)}
        low, high = config.cov_clip_low, config.cov_clip_high
        kept_R = clip_cov_advantages(
            advantages_R, old_R, over, keys, config.cov_clip_fraction, low, high
        )
        return {"advantages_T": response_column(kept_R, batch)}

    def _compare_parts(self, samples: SampleValues, who: Producer) -> Tensor:
        """Sums parts' weighted advantages (GDPO, Liu et al., arXiv 2601.05242, eq. 4, 5, 7)."""
        total_B = torch.zeros(samples.num_samples, dtype=torch.float64)
        for name, part_B in self._parts(samples, who).items():
            weight = self.config.part_weights.get(name, 1.0)
            total_B += weight * self._compare(part_B.double(), samples, who)
        return total_B

    def _parts(self, samples: SampleValues, who: Producer) -> dict[str, Tensor]:
        # The greedy response's reward is the same for the whole group; only ReMax uses it.
        found = {name: part_B for name, part_B in samples.reward_parts.items() if name != GREEDY}
        wanted = self.config.part_weights
        unknown = sorted(set(wanted) - set(found))
        if unknown or not found:
            got = f"returned no part {unknown[0]!r}" if unknown else "returned no parts"
            allowed = ", ".join(sorted(found)) or "at least one part"
            remedy = "Change algorithm.part_weights, or make the reward return this part."
            raise BatchError(who, "reward_parts", got, allowed, remedy)
        return {name: found[name] for name in wanted or found}

    def _compare(self, reward_B: Tensor, samples: SampleValues, who: Producer) -> Tensor:
        config, group_B = self.config, samples.group_B
        if config.baseline == "pass_at_k":
            is_passed_B = reward_B >= config.pass_reward
            return pass_at_k(is_passed_B, group_B, config.pass_k, config.normalize_std)
        if config.baseline == "greedy":
            return reward_B - self._greedy(samples, who)
        if config.baseline == "leave_one_out":
            centred_B = leave_one_out(reward_B, group_B)
        elif config.baseline == "length_weighted":
            centred_B = minus_group_mean(reward_B, group_B, samples.response_lengths_B)
        else:
            centred_B = minus_group_mean(reward_B, group_B)
        return divided_by_group_std(centred_B, group_B) if config.normalize_std else centred_B

    def _greedy(self, samples: SampleValues, who: Producer) -> Tensor:
        """Returns each prompt's greedy reward (ReMax, Li et al. 2023, arXiv 2310.10505)."""
        if GREEDY not in samples.reward_parts:
            got = f"returned a batch without the part {GREEDY!r}"
            expected = f"the reward of a greedy response to each prompt, which {self.name} needs"
            remedy = "Call sampler.generate(prompts, greedy=True)."
            raise BatchError(who, "reward_parts", got, expected, remedy)
        return samples.reward_parts[GREEDY].double()

    def _check_groups(self, samples: SampleValues, who: Producer) -> None:
        fewest = self.config.min_samples
        groups, counts = samples.group_B.unique(return_counts=True)
        if (least := int(counts.min())) < fewest:
            group = int(groups[counts.argmin()])
            got = f"returned {least} sample{'s' * (least > 1)} for group {group}"
            expected = f"{fewest} or more, which {self.name} needs"
            remedy = "Raise steps.samples_per_prompt."
            raise BatchError(who, "group_B", got, expected, remedy)
