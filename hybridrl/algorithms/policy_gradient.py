"""Loss and denominator shared by all algorithms with policy gradients.

Subclasses define the advantages. The loss at each token is the sum of three independent terms
(objective, KL, entropy), and `aggregate` determines the weight of each position.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hybridrl.algorithms import correction
from hybridrl.algorithms.advantage import (
    last_token_rewards,
    overlong_penalty,
    response_values,
    sample_column,
    sequence_kl,
    token_kl,
)
from hybridrl.algorithms.base import LossOutput, num_response_tokens
from hybridrl.algorithms.centering import mean_score
from hybridrl.algorithms.log_ratio import importance_ratio, kl_estimate
from hybridrl.config.algorithm import PolicyGradientConfig
from hybridrl.contracts.batch import MicroBatch, Producer, SampleValues, ScoredBatch, TrainBatch
from hybridrl.errors import UserError

Config = TypeVar("Config", bound=PolicyGradientConfig)
MAX_ERROR = 0.2


@dataclass(frozen=True)
class AdaptiveKl:
    """Steers the KL to a target in nats per response (Ziegler et al. 2019, arXiv 1909.08593, sec.
    2.2).

    coefficient <- coefficient (1 + e n / horizon), with e = clip(KL / target - 1, -0.2, 0.2) and n
    samples in the step, as in the authors' code (openai/lm-human-preferences). The paper's K_beta
    is n / horizon. n is capped at the horizon, so that the coefficient stays positive.
    """

    target: float
    horizon: int

    def next(self, coefficient: float, kl: float, num_samples: int) -> float:
        """Returns the coefficient after a step; unchanged if `kl` is not finite (skipped step)."""
        if not math.isfinite(kl):
            return coefficient
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        return coefficient * (1 + error * min(num_samples / self.horizon, 1.0))


class PolicyGradient(Generic[Config]):
    """Policy-gradient loss for advantages from any source.

    loss = sum_t w_t (-objective_t + kl_coef kl_t - entropy_coef entropy_t) / denominator, over
    response tokens. The weight w and the denominator depend on `aggregate`:

        token_mean: w = 1, denominator = number of tokens (DAPO, Yu et al. 2025, arXiv 2503.14476,
            eq. 12).
        sequence_mean: w = 1 / response length, denominator = number of responses (GRPO, Shao et al.
            2024, arXiv 2402.03300, eq. 3).
        fixed: w = 1, denominator = number of responses x `fixed_length` (Dr. GRPO, Liu et al. 2025,
            arXiv 2503.20783, sec. 3.2).

    A response is a sample. If a sample consists of several sequences, its length is the number of
    sampled tokens in all of them.

    The weight from `correction` multiplies the objective and does not change the denominator.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self._kl_in_reward = config.kl_coef > 0 and config.kl_in == "reward"
        self._kl_in_loss = config.kl_coef > 0 and config.kl_in == "loss"
        self.correction = config.correction
        self.kl_coef, self._adaptive = config.kl_coef, None
        if config.kl_target is not None:
            self._adaptive = AdaptiveKl(config.kl_target, config.kl_horizon)
        self.needs = config.needs

    @property
    def name(self) -> str:
        return self.config.name

    def denominator(self, batch: TrainBatch) -> float:
        """Returns the denominator of the mean: a number of tokens or of responses."""
        if self.config.aggregate == "token_mean":
            return num_response_tokens(batch)
        fixed = self.config.aggregate == "fixed"
        return batch.by_sample().num_samples * (self.config.fixed_length if fixed else 1.0)

    def loss(
        self, logp_S: Tensor, entropy_S: Tensor, micro: MicroBatch, denominator: float
    ) -> LossOutput:
        """Returns the policy's loss; arguments as in `Algorithm.loss`.

        Raises:
            UserError: The loss needs whole responses, but context parallelism splits them.
        """
        config, mask_S = self.config, micro.loss_mask_S
        # Mask before computing, because values at masked positions may overflow, and 0 x inf is
        # NaN. The columns are already zero at masked positions, so every term below is zero too.
        logp_S = logp_S.masked_fill(~mask_S, 0.0)
        entropy_S = entropy_S.masked_fill(~mask_S, 0.0)
        old_S = logp_S.detach() if micro.old_logp_S is None else micro.old_logp_S
        advantages_S = micro.require("advantages_S", self.name)
        if config.needs_whole_sequences:
            self._check_whole(micro)
        proximal_S = old_S
        if config.correction.proximal == "behaviour":
            proximal_S = micro.require("behaviour_logp_S", self.name)
        objective_S, clipped_S = self._objective(logp_S, logp_S - proximal_S, advantages_S, micro)
        if config.correction.is_on:
            objective_S = objective_S * self._correction_weights(old_S, micro)
        loss_S = -objective_S - config.entropy_coef * entropy_S
        if (term_S := self.own_term(logp_S, old_S, micro)) is not None:
            loss_S = loss_S + term_S
        if self._kl_in_loss:
            reference_S = micro.require("reference_logp_S", self.name)
            kl_S = kl_estimate(logp_S, reference_S, config.kl_estimator)
            if config.kl_importance_weighted:
                kl_S = kl_S * importance_ratio(logp_S - old_S)
            loss_S = loss_S + self.kl_coef * kl_S
        loss_S = self.weighted(loss_S, micro)
        metrics = {
            "policy/clip_fraction": clipped_S.sum(),
            "policy/entropy": entropy_S.detach().sum(),
            "policy/kl": _reported_kl(logp_S.detach(), old_S, micro.reference_logp_S).sum(),
        }
        return LossOutput(loss_S.sum() / denominator, metrics)

    def centering_loss(
        self, logp_SK: Tensor, engine_logp_SK: Tensor, micro: MicroBatch, denominator: float
    ) -> Tensor:
        """Returns the loss whose gradient subtracts the mean score (centering.py); to be added.

        Args:
            logp_SK: The policy's log-probabilities of likely tokens, with a gradient.
            engine_logp_SK: The engine's; -inf for entries to leave out.
        """
        mean_S = mean_score(logp_SK, engine_logp_SK, self.correction)
        mean_S = mean_S.masked_fill(~micro.loss_mask_S, 0.0)
        loss_S = self.weighted(micro.require("advantages_S", self.name) * mean_S, micro)
        return loss_S.sum() / denominator

    def own_term(self, logp_S: Tensor, old_S: Tensor, micro: MicroBatch) -> Tensor | None:
        """Returns an additional loss at each position (S,), or None if there is none."""
        return None

    def after_step(self, batch: TrainBatch) -> dict[str, float]:
        """Adapts the KL coefficient to the KL of the step's samples, if `kl_target` is set."""
        if self._adaptive is None:
            return {}
        used, kl = self.kl_coef, sequence_kl(batch, self.name)
        self.kl_coef = self._adaptive.next(used, kl, batch.by_sample().num_samples)
        return {"policy/kl_coef": used, "policy/kl_sequence": kl}

    def state(self) -> dict[str, float]:
        return {} if self._adaptive is None else {"kl_coef": self.kl_coef}

    def load_state(self, state: Mapping[str, float]) -> None:
        if self._adaptive is not None:
            self.kl_coef = float(state.get("kl_coef", self.kl_coef))

    def weighted(self, loss_S: Tensor, micro: MicroBatch) -> Tensor:
        if self.config.aggregate != "sequence_mean":
            return loss_S
        if micro.loss_weights_S is not None:
            return loss_S * micro.loss_weights_S
        return loss_S / sequence_sum(micro.loss_mask_S.to(loss_S.dtype), micro).clamp(min=1)

    def rewards(self, samples: ScoredBatch | SampleValues) -> Tensor:
        """Returns each sample's reward, including the penalty for its length: (B,) float64."""
        reward_B, longest = samples.reward_B.double(), self.config.overlong_max_tokens
        if longest is None:
            return reward_B
        buffer = self.config.overlong_buffer_tokens
        return reward_B + overlong_penalty(samples.response_lengths_B, longest, buffer)

    def with_columns(self, batch: TrainBatch, **columns: Tensor) -> TrainBatch:
        """Returns the batch with the columns that `advantages` computed.

        If samples have several sequences and `aggregate` is `sequence_mean`, adds token weights,
        because a micro-batch may contain only some sequences of a sample.
        """
        if batch.sequence_B is not None and self.config.aggregate == "sequence_mean":
            length_B = batch.sequences.of_sequences(batch.by_sample().response_lengths_B)
            columns["loss_weights_T"] = sample_column(1 / length_B.double(), batch)
        return batch.join_columns(Producer.here(self.name), **columns)

    def kl_penalty(self, batch: TrainBatch) -> Tensor | None:
        """Returns each token's KL penalty in the reward, (T,) float64; None if there is none."""
        if not self._kl_in_reward:
            return None
        return self.kl_coef * token_kl(batch, self.config.kl_estimator, self.name)

    def token_rewards(self, batch: TrainBatch) -> Tensor:
        """Returns the reward of each response token: (R,) float64.

        The sample's reward is given at the last token of each of its sequences; each token's KL
        penalty is subtracted.
        """
        reward_H = batch.of_held(batch.sequences.of_sequences(self.rewards(batch.by_sample())))
        rewards_R = last_token_rewards(reward_H, batch.response_lengths_H)
        if (penalty_T := self.kl_penalty(batch)) is not None:
            rewards_R = rewards_R - response_values(penalty_T, batch)
        return rewards_R

    def _objective(
        self, logp_S: Tensor, log_ratio_S: Tensor, advantages_S: Tensor, micro: MicroBatch
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        low, high = config.clip_low, config.clip_high
        if config.objective == "clip":
            return clipped_surrogate(log_ratio_S, advantages_S, low, high, config.dual_clip)
        if config.objective == "ratio":
            ratio_S = importance_ratio(log_ratio_S)
            return ratio_S * advantages_S, torch.zeros_like(micro.loss_mask_S)
        if config.objective == "sequence_clip":
            log_ratio_S = with_sequence_mean(log_ratio_S, micro)
            return clipped_surrogate(log_ratio_S, advantages_S, low, high)
        if config.objective == "geometric_mean":
            bounded_S, clipped_S = clipped_log_ratio(log_ratio_S, advantages_S, low, high)
            ratio_S = importance_ratio(with_sequence_mean(bounded_S, micro))
            return ratio_S * advantages_S, clipped_S
        if config.objective == "cispo":
            return weighted_logp(logp_S, log_ratio_S, advantages_S, low, high)
        if config.objective == "sapo":
            taus = config.sapo_tau_positive, config.sapo_tau_negative
            gated_S = soft_gated(log_ratio_S, advantages_S, *taus)
            return gated_S, torch.zeros_like(micro.loss_mask_S)
        return logp_S * advantages_S, torch.zeros_like(micro.loss_mask_S)

    def _correction_weights(self, old_S: Tensor, micro: MicroBatch) -> Tensor:
        behaviour_S = micro.require("behaviour_logp_S", self.name)

        def sum_of(value_S: Tensor) -> Tensor:
            return sequence_sum(value_S.masked_fill(~micro.loss_mask_S, 0.0), micro)

        return correction.weights(old_S - behaviour_S, self.correction, sum_of)

    def _check_whole(self, micro: MicroBatch) -> None:
        # Sync point: reads one number per micro-batch, only for losses over whole responses.
        if int(micro.cu_seqlens[-1]) == micro.num_positions:
            return
        section = self.config
        raise UserError(
            "train.cp",
            "above 1",
            f"1 with algorithm.objective={section.objective}, aggregate={section.aggregate}, "
            f"correction.weight={section.correction.weight}, reject={section.correction.reject}: "
            "this loss needs all tokens of a response on one rank",
            "Set train.cp=1, or choose a token-level objective and correction and set "
            "algorithm.aggregate to token_mean or fixed.",
        )


def clipped_surrogate(
    log_ratio_S: Tensor,
    advantages_S: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the clipped objective of PPO (Schulman et al. 2017, arXiv 1707.06347, eq. 7).

    min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logp - old_logp). The paper uses
    equal bounds; DAPO raises the upper bound (Yu et al. 2025, arXiv 2503.14476, eq. 10). With the
    ratio of a whole response this is GSPO's objective (Zheng et al. 2025, arXiv 2507.18071, eq. 5).

    Args:
        dual_clip: Factor c > 1; where A < 0 the objective is at least c A (Ye et al. 2020, arXiv
            1912.09729). If None, there is no lower bound.

    Returns:
        The objective, and a mask of the positions where it is clipped and has no gradient.
    """
    ratio_S = importance_ratio(log_ratio_S)
    plain_S = ratio_S * advantages_S
    clipped_S = ratio_S.clamp(1 - clip_low, 1 + clip_high) * advantages_S
    objective_S, is_clipped_S = torch.minimum(plain_S, clipped_S), clipped_S < plain_S
    if dual_clip is None:
        return objective_S, is_clipped_S
    floor_S = dual_clip * advantages_S
    is_below_S = (advantages_S < 0) & (objective_S < floor_S)
    return torch.where(is_below_S, floor_S, objective_S), is_clipped_S | is_below_S


def clipped_log_ratio(
    log_ratio_S: Tensor, advantages_S: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Returns GMPO's clipped log-ratio and a mask of the clipped positions.

    The log-ratio is clipped from above at clip_high where A > 0, and from below at -clip_low
    elsewhere. The geometric mean is taken afterwards (Zhao et al. 2025, arXiv 2507.20673).
    """
    bounded_S = torch.where(
        advantages_S > 0, log_ratio_S.clamp(max=clip_high), log_ratio_S.clamp(min=-clip_low)
    )
    return bounded_S, bounded_S != log_ratio_S


def weighted_logp(
    logp_S: Tensor, log_ratio_S: Tensor, advantages_S: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Returns CISPO's objective (MiniMax 2025, arXiv 2506.13585, eq. 4-5) and a mask of clipped
    weights.

    The objective is sg(clip(r, 1 - clip_low, 1 + clip_high)) A logp, where sg stops the gradient.
    The weight is bounded, but every token keeps a gradient.
    """
    ratio_S = importance_ratio(log_ratio_S.detach())
    weight_S = ratio_S.clamp(1 - clip_low, 1 + clip_high)
    return weight_S * advantages_S * logp_S, weight_S != ratio_S


def soft_gated(
    log_ratio_S: Tensor, advantages_S: Tensor, tau_positive: float, tau_negative: float
) -> Tensor:
    """Returns SAPO's objective (Gao et al. 2025, arXiv 2511.20347, eq. 5-6).

    4 / tau sigmoid(tau (r - 1)) A, with one temperature tau for positive advantages and another for
    all others. At r = 1 the gradient equals the gradient of r A; on both sides of r = 1 it
    decreases.
    """
    tau_S = torch.full_like(log_ratio_S, tau_negative).masked_fill(advantages_S > 0, tau_positive)
    gate_S = torch.sigmoid(tau_S * (importance_ratio(log_ratio_S) - 1))
    return 4 / tau_S * gate_S * advantages_S


def sequence_sum(value_S: Tensor, micro: MicroBatch) -> Tensor:
    """Returns the sum over each position's sequence in a micro-batch of whole sequences: (S,).

    Uses no atomics, so that results are bitwise reproducible.
    """
    lengths = micro.cu_seqlens.diff().long()
    sums = torch.segment_reduce(value_S, "sum", lengths=lengths, unsafe=True)
    return torch.repeat_interleave(sums, lengths, output_size=len(value_S))


def with_sequence_mean(value_S: Tensor, micro: MicroBatch) -> Tensor:
    """Returns, at each token, the mean over its response, with the gradient of the token's own
    value.

    GSPO-token uses this form (Zheng et al. 2025, arXiv 2507.18071, eq. 14). If all tokens of a
    response have the same weight, the total gradient equals the gradient of the mean.
    """
    mask_S = micro.loss_mask_S
    count_S = sequence_sum(mask_S.to(value_S.dtype), micro).clamp(min=1)
    mean_S = sequence_sum(value_S.detach(), micro) / count_S
    return (mean_S + value_S - value_S.detach()).masked_fill(~mask_S, 0.0)


def _reported_kl(logp_S: Tensor, old_S: Tensor, reference_S: Tensor | None) -> Tensor:
    """Estimates KL(policy, reference), or KL(old, policy) without a reference, with k3."""
    if reference_S is not None:
        return kl_estimate(logp_S, reference_S, "k3")
    return kl_estimate(old_S, logp_S, "k3")
