"""Online DPO (Guo et al. 2024, arXiv 2402.04792): DPO on pairs of the policy's own samples.

The samples of highest and lowest reward of a prompt make a pair; the others are not trained on. The
paper samples two responses and asks a language model for the better one; here rewards decide. A
group of equal rewards makes no pair, and the loss is the mean over the pairs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hybridrl.algorithms.advantage import uniform_groups
from hybridrl.algorithms.preference import Dpo
from hybridrl.config.supervised import OnlineDpoConfig
from hybridrl.contracts.batch import Producer, ScoredBatch, TrainBatch


class OnlineDpo(Dpo):
    """Pair losses of `Dpo` on pairs of samples.

    They have no importance ratio, like algorithm 1 of the paper: a preference holds whichever
    policy sampled the two responses.
    """

    def __init__(self, config: OnlineDpoConfig) -> None:
        super().__init__(config)
        self.max_resampling = config.max_resampling

    def uninformative(self, batch: ScoredBatch) -> Tensor:
        """Returns a mask of the samples in groups that make no pair: (B,) bool."""
        return uniform_groups(batch.reward_B, batch.group_B)

    def selected(self, batch: ScoredBatch) -> Tensor:
        """Returns the indices of the samples in pairs, ascending. Ties of rewards go to the lowest
        sample number. Returns the first sample alone if there is no pair.
        """
        is_excluded_B = self.uninformative(batch).numpy()
        reward_B, group_B = batch.reward_B.numpy(), batch.group_B.numpy()
        found = []
        for key_B in (-reward_B, reward_B):
            order_B = np.lexsort((batch.sample_ids_B.numpy(), key_B, group_B))
            order_B = order_B[~is_excluded_B[order_B]]
            found.append(order_B[np.unique(group_B[order_B], return_index=True)[1]])
        index = np.sort(np.concatenate(found))
        return torch.from_numpy(index) if len(index) else torch.zeros(1, dtype=torch.int64)

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Returns the samples in pairs with their advantages, zero if there is no pair."""
        batch = batch.select(self.selected(batch))
        if bool(self.uninformative(batch).any()):
            zeros_T = torch.zeros(batch.num_tokens)
            return batch.join_columns(Producer.here(self.name), advantages_T=zeros_T)
        return super().advantages(batch)
