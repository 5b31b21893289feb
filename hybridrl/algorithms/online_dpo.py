"""Online DPO (Guo et al. 2024, arXiv 2402.04792): DPO on pairs of the policy's own samples.

For each prompt, the samples with the highest and the lowest reward form a pair; others are not
used, and a group of equal rewards has none. In the paper, a language model chooses the better of
two responses. The loss is the mean over the pairs.
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
    """Applies the pair losses of `Dpo` to pairs of samples.

    As in the paper's algorithm 1, the losses have no importance ratio, because a preference between
    two responses does not depend on which policy sampled them.
    """

    def __init__(self, config: OnlineDpoConfig) -> None:
        super().__init__(config)
        self.max_resampling = config.max_resampling

    def uninformative(self, batch: ScoredBatch) -> Tensor:
        """Returns a mask of the samples in groups that yield no pair: (B,) bool."""
        return uniform_groups(batch.reward_B, batch.group_B)

    def selected(self, batch: ScoredBatch) -> Tensor:
        """Returns the samples in pairs, ascending; if there are no pairs, only the first sample."""
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
        """Returns the samples of pairs with advantages, which are zero if there is no pair."""
        batch = batch.select(self.selected(batch))
        if bool(self.uninformative(batch).any()):
            zeros_T = torch.zeros(batch.num_tokens)
            return batch.join_columns(Producer.here(self.name), advantages_T=zeros_T)
        return super().advantages(batch)
