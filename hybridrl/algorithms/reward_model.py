"""Trains a reward model on preference pairs.

The score of a response is the value at its last token, which may be the end token, as in
transformers' sequence classifiers. A pair's loss L couples two samples, so L is differentiated once
for the whole step, as in preference.py: `advantages` stores -dL/ds_i at the last token of response
i, and the loss of a micro-batch is linear in the values. No policy is trained.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from hybridrl.algorithms.base import LossOutput
from hybridrl.algorithms.preference import IMPLICIT, LOSS, pairs
from hybridrl.config.supervised import PAIR_MARGIN, RewardModelConfig
from hybridrl.contracts.batch import MicroBatch, Producer, TrainBatch


class RewardModel:
    """Bradley-Terry likelihood of preferences (Ouyang et al. 2022, arXiv 2203.02155, eq. 1).

    -log sigmoid(s_chosen - s_rejected - m) + center_coef (s_chosen + s_rejected)^2, mean over
    pairs. m is the margin from Llama 2 (Touvron et al. 2023, arXiv 2307.09288, eq. 2): the knob
    `margin` plus the row's own margin (`data.margin_key`). The term with center_coef keeps scores
    near 0 (Eisenstein et al. 2023, arXiv 2312.09244, eq. 2).
    """

    name = "reward_model"

    def __init__(self, config: RewardModelConfig) -> None:
        self.config, self.needs = config, config.needs

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Stores, at each response's last token, minus the loss's derivative by its score."""
        last_H = batch.offsets[1:] - 1
        values_T = batch.require("values_T", self.name)
        with torch.enable_grad():
            score_B = batch.completed(values_T[last_H].double()).requires_grad_()
            loss_B = self.losses(score_B, batch)
            (slope_B,) = torch.autograd.grad(loss_B.sum(), score_B)
        advantages_T = torch.zeros(batch.num_tokens)
        advantages_T[last_H] = -batch.of_held(slope_B).float()
        parts = {IMPLICIT: score_B.detach().float(), LOSS: loss_B.detach().float()}
        return batch.join_columns(Producer.here(self.name), advantages_T=advantages_T).with_parts(
            parts
        )

    def losses(self, score_B: Tensor, batch: TrainBatch) -> Tensor:
        """Returns, for each sample, half of its pair's loss: (B,)."""
        chosen_P, rejected_P = pairs(batch)
        rows = [batch.prompts[i].columns for i in chosen_P.tolist()]
        margins = [float(str(row.get(PAIR_MARGIN, 0))) for row in rows]
        margin_P = torch.tensor(margins, dtype=score_B.dtype) + self.config.margin
        s_P, r_P = score_B[chosen_P], score_B[rejected_P]
        loss_P = -logsigmoid(s_P - r_P - margin_P) + self.config.center_coef * (s_P + r_P).square()
        loss_B = torch.zeros_like(score_B)
        return loss_B.index_add(0, chosen_P, loss_P / 2).index_add(0, rejected_P, loss_P / 2)

    def denominator(self, batch: TrainBatch) -> float:
        return batch.num_samples / 2

    def loss(
        self, logp_S: Tensor, entropy_S: Tensor, micro: MicroBatch, denominator: float
    ) -> LossOutput:
        """Returns zero, because no policy is trained."""
        return LossOutput(logp_S.masked_fill(~micro.loss_mask_S, 0.0).sum() * 0.0)

    def value_loss(self, values_S: Tensor, micro: MicroBatch, denominator: float) -> LossOutput:
        """Returns the loss whose gradient is minus the advantages; 0 at the start of the step."""
        old_S, slope_S = (
            micro.require(f"{name}_S", self.name) for name in ("values", "advantages")
        )
        moved_S = values_S.masked_fill(~micro.loss_mask_S, 0.0) - old_S
        return LossOutput(-(slope_S * moved_S).sum() / denominator)
