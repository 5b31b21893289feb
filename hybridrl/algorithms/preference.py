"""Preference optimization: DPO and its variants on pairs, KTO on labelled responses.

The losses couple the log-probabilities s_i of whole responses. `advantages` differentiates the loss
L with respect to each s_i for the policy at the start of the step, and assigns -dL/ds_i to every
token of response i. `loss` is linear in the tokens' log-probabilities, so its gradient equals that
of L, however the batch is split into micro-batches, ranks and context-parallel parts. This costs
one additional forward pass.
"""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridrl.algorithms.advantage import response_values, sample_column
from hybridrl.algorithms.base import LossOutput
from hybridrl.algorithms.over_tokens import OverTokens
from hybridrl.config.supervised import DpoConfig, KtoConfig, OnlineDpoConfig
from hybridrl.contracts.batch import UNRELATED, BatchError, MicroBatch, Producer, TrainBatch

# Names of the reward parts that `ResponseLoss.advantages` reports as metrics: beta times the (mean)
# log-ratio; the sample's share of the loss; and, with KTO, the estimated KL. They contain a dot, so
# no scorer can have the same name.
IMPLICIT, LOSS, KL = "feedback.implicit_reward", "feedback.loss", "feedback.kl"


Config = TypeVar("Config", bound=DpoConfig | OnlineDpoConfig | KtoConfig)


class ResponseLoss(Generic[Config]):
    """An algorithm whose loss is a function of whole responses; subclasses define `losses`."""

    def __init__(self, config: Config) -> None:
        self.config, self.name, self.needs = config, config.name, config.needs

    def losses(self, logp_B: Tensor, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns each sample's share of the loss (B,), and parts to report as metrics.

        Args:
            logp_B: Log-probability of each response under the policy, float64, with a gradient.
            batch: Samples with the columns that the algorithm needs.
        """
        raise NotImplementedError

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Assigns -dL/ds of each response to all its tokens, with reward parts for metrics."""
        old_T = batch.require("old_logp_T", self.name)
        with torch.enable_grad():
            logp_B = response_sums(old_T, batch).requires_grad_()
            loss_B, parts = self.losses(logp_B, batch)
            (slope_B,) = torch.autograd.grad(loss_B.sum(), logp_B)
        advantages_T = sample_column(-slope_B, batch)
        reported = {LOSS: loss_B, **parts}
        return batch.join_columns(Producer.here(self.name), advantages_T=advantages_T).with_parts(
            {part: value_B.detach().float() for part, value_B in reported.items()}
        )

    def loss(
        self, logp_S: Tensor, entropy_S: Tensor, micro: MicroBatch, denominator: float
    ) -> LossOutput:
        """Returns the loss whose gradient is minus the advantages: the first-order change of L,
        which is 0 at the start of the step. `feedback_metrics` reports L itself.
        """
        mask_S = micro.loss_mask_S
        logp_S, entropy_S = (x.masked_fill(~mask_S, 0.0) for x in (logp_S, entropy_S.detach()))
        old_S = micro.require("old_logp_S", self.name)
        advantages_S = micro.require("advantages_S", self.name)
        metrics = {"policy/entropy": entropy_S.sum()}
        if micro.reference_logp_S is not None:
            metrics["policy/kl"] = (logp_S.detach() - micro.reference_logp_S).sum()
        return LossOutput(-(advantages_S * (logp_S - old_S)).sum() / denominator, metrics)


class Dpo(ResponseLoss[DpoConfig | OnlineDpoConfig]):
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, eq. 7) and the
    variants in `config.supervised.PAIR_PRESETS`.

    Let s = logp - reference_logp of a response (s = logp if `reference` is off), divided by its
    length if `length_normalized`, and h = s_chosen - s_rejected. The loss of a pair is

        sigmoid: -(1 - e) log sigmoid(x) - e log sigmoid(-x), x = beta h - target_margin. e = 0 is
            DPO; e > 0 is cDPO (Mitchell 2023, ericmitchell.ai/cdpo.pdf, eq. 3). With lengths it is
            Tulu 3's (Lambert et al. 2024, arXiv 2411.15124, eq. 6). With lengths and a margin but
            no reference it is SimPO (Meng et al. 2024, arXiv 2405.14734, eq. 6).
        squared: (h - 1 / (2 beta))^2, IPO (Azar et al. 2023, arXiv 2310.12036, eq. 17), with
            lengths as in the authors' experiments.
        odds_ratio: -beta log sigmoid(o_chosen - o_rejected), o = s - log(1 - exp(s)), the second
            term of ORPO (Hong et al. 2024, arXiv 2403.07691, eq. 6-7). With sft_coef 1, the loss
            includes ORPO's first term.

    plus sft_coef times -logp_chosen / length_chosen. The loss of a mini-batch is the mean over
    pairs.
    """

    def denominator(self, batch: TrainBatch) -> float:
        return batch.num_samples / 2

    def losses(self, logp_B: Tensor, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns, for each sample, half of its pair's loss; see `ResponseLoss`."""
        config, lengths_B = self.config, batch.response_lengths_B
        score_B = logp_B
        if config.reference:
            score_B = logp_B - reference_sums(batch, self.name)
        if config.length_normalized:
            score_B = score_B / lengths_B
        chosen_P, rejected_P = pairs(batch)
        loss_P = self._pair_loss(score_B[chosen_P], score_B[rejected_P])
        if config.sft_coef:
            loss_P = loss_P - config.sft_coef * (logp_B / lengths_B)[chosen_P]
        # Deterministic: each index occurs once.
        loss_B = torch.zeros_like(logp_B)
        loss_B = loss_B.index_add(0, chosen_P, loss_P / 2).index_add(0, rejected_P, loss_P / 2)
        return loss_B, {IMPLICIT: config.beta * score_B}

    def _pair_loss(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        config = self.config
        h_P = chosen_P - rejected_P
        if config.loss == "squared":
            return (h_P - 1 / (2 * config.beta)).square()
        if config.loss == "odds_ratio":
            odds_P = log_odds(chosen_P) - log_odds(rejected_P)
            return -config.beta * logsigmoid(odds_P)
        x_P, e = config.beta * h_P - config.target_margin, config.label_smoothing
        return -(1 - e) * logsigmoid(x_P) - e * logsigmoid(-x_P)


class Kto(ResponseLoss[KtoConfig]):
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv 2402.01306, eq. 8).

    With s = logp - reference_logp, the loss of a response is w (1 - sigmoid(beta (s - z))) if it is
    desirable and w (1 - sigmoid(beta (z - s))) if not. Desirable and undesirable responses have
    different weights w. The reference point z has no gradient. z is max(0, mean of s) over
    unrelated samples: prompts that are paired with responses to other prompts (sec. 4.1). The mean
    is over the whole step, whereas the paper uses each micro-batch.
    """

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Computes advantages; removes unrelated samples. Raises BatchError if all or none are."""
        none_B = torch.zeros(batch.num_samples)
        is_unrelated_B = batch.reward_parts.get(UNRELATED, none_B) > 0
        if not 0 < (num := int(is_unrelated_B.sum())) < batch.num_samples:
            got = f"returned {num} unrelated of {batch.num_samples} samples"
            raise BatchError(batch.producer, UNRELATED, got, "some, but not all, for kto")
        ratio_B = response_sums(batch.require("old_logp_T", self.name), batch)
        ratio_B = ratio_B - reference_sums(batch, self.name)
        kl = ratio_B[is_unrelated_B].mean().clamp(min=0)
        kept = batch.select((~is_unrelated_B).nonzero()[:, 0])
        kept = kept.with_parts({KL: kl.expand(kept.num_samples).float()})
        return super().advantages(kept)

    def denominator(self, batch: TrainBatch) -> float:
        return float(batch.num_samples)

    def losses(self, logp_B: Tensor, batch: TrainBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns each response's loss; see `ResponseLoss`."""
        config, is_good_B = self.config, batch.reward_B > 0
        ratio_B = logp_B - reference_sums(batch, self.name)
        gain_B = config.beta * (ratio_B - batch.reward_parts[KL].double())
        weight_B = torch.where(is_good_B, config.desirable_weight, config.undesirable_weight)
        loss_B = weight_B * torch.sigmoid(torch.where(is_good_B, -gain_B, gain_B))
        return loss_B, {IMPLICIT: config.beta * ratio_B}


def pairs(batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Returns the better and the worse samples, by group. BatchError if a group is not a pair."""
    groups, counts = batch.group_B.unique(return_counts=True)
    order_B = torch.from_numpy(np.lexsort((batch.reward_B.numpy(), batch.group_B.numpy())))
    wrong = groups[counts != 2]
    if not len(wrong):
        worse_P, better_P = order_B.view(-1, 2).unbind(1)
        wrong = groups[batch.reward_B[better_P] <= batch.reward_B[worse_P]]
    if len(wrong):
        got = f"returned groups {wrong.tolist()[:8]} that are not pairs"
        allowed = "one better and one worse sample in each group"
        raise BatchError(batch.producer, "group_B", got, allowed)
    return better_P, worse_P


def response_sums(column_T: Tensor, batch: TrainBatch) -> Tensor:
    """Returns the sum of a column over each response: (B,) float64."""
    return OverTokens(batch).sums(response_values(column_T, batch))[:, 0]


def reference_sums(batch: TrainBatch, needed_by: str) -> Tensor:
    """Returns each response's log-probability under the reference: (B,) float64."""
    return response_sums(batch.require("reference_logp_T", needed_by), batch)


def log_odds(logp: Tensor) -> Tensor:
    """Returns log(p / (1 - p)), given log p, with p capped at exp(-1e-7) to be finite."""
    logp = logp.clamp(max=-1e-7)
    return logp - (-logp.expm1()).log()


def feedback_metrics(batch: TrainBatch) -> dict[str, float]:
    """Returns the metrics of a step on pairs or labels, before its update; {} for other batches.

    `preference/accuracy` is the fraction of (better, worse) pairs that the implicit rewards order
    correctly; a tie counts half. With labels, every desirable response of the step is paired with
    every undesirable one, so the accuracy is the area under the ROC curve. There are no metrics for
    a class without samples.
    """
    parts = batch.reward_parts
    if IMPLICIT not in parts:
        return {}
    reward_B = parts[IMPLICIT].double()
    sides = (batch.reward_B > 0, batch.reward_B <= 0) if KL in parts else pairs(batch)
    good, bad = (reward_B[side] for side in sides)
    metrics: dict[str, float] = {}
    for name, rewards in (("chosen", good), ("rejected", bad)):
        if len(rewards):
            metrics[f"preference/{name}_reward"] = float(rewards.mean())
    if len(good) and len(bad):
        metrics["preference/margin"] = float(good.mean() - bad.mean())
        metrics["preference/accuracy"] = _accuracy(good, bad, KL not in parts)
    num_losses = batch.num_samples / 2
    if KL in parts:
        num_losses = batch.num_samples
        metrics["preference/kl"] = float(parts[KL][0])
        metrics["preference/desirable_fraction"] = len(good) / batch.num_samples
    metrics["policy/loss"] = float(parts[LOSS].double().sum()) / num_losses
    return metrics


def _accuracy(good: Tensor, bad: Tensor, are_pairs: bool) -> float:
    if are_pairs:
        return float(((good - bad).sign() + 1).mean() / 2)
    bad = bad.sort().values
    below, not_above = (torch.searchsorted(bad, good, right=right) for right in (False, True))
    return float((below + not_above).double().mean()) / (2 * len(bad))
