"""Supervised fine-tuning: mean negative log-likelihood of the response tokens in demonstrations."""

from __future__ import annotations

from torch import Tensor

from hybridrl.algorithms.base import LossOutput, num_response_tokens
from hybridrl.config.schema import SftConfig
from hybridrl.contracts.batch import MicroBatch, TrainBatch


class Sft:
    """Learns responses from the data, without rollouts, rewards or another model."""

    name = "sft"

    def __init__(self, config: SftConfig) -> None:
        self.config, self.needs = config, config.needs

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        return batch

    def denominator(self, batch: TrainBatch) -> float:
        return num_response_tokens(batch)

    def loss(
        self, logp_S: Tensor, entropy_S: Tensor, micro: MicroBatch, denominator: float
    ) -> LossOutput:
        logp_S = logp_S.masked_fill(~micro.loss_mask_S, 0.0)
        entropy = entropy_S.detach().masked_fill(~micro.loss_mask_S, 0.0).sum()
        return LossOutput(-logp_S.sum() / denominator, {"policy/entropy": entropy})
