"""Online DPO (Guo et al. 2024, arXiv 2402.04792): direct preference optimization on samples of the
policy.

Of the samples of a prompt the one of the highest and the one of the lowest reward make a pair; the
others only take part in that choice. The paper samples two, and lets a language model prefer one;
the order of a reward is such a preference. A group of equal rewards prefers nothing: it makes no
pair, and the mean is over the pairs that there are.
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
    """The pair losses of `Dpo`, on pairs of samples; no importance ratio: a preference holds
    whichever policy sampled the two (algorithm 1 has none).
    """

    def __init__(self, config: OnlineDpoConfig) -> None:
        super().__init__(config)
        self.max_resampling = config.max_resampling

    def uninformative(self, batch: ScoredBatch) -> Tensor:
        """Returns which samples are in groups that make no pair: (B,) bool."""
        return uniform_groups(batch.reward_B, batch.group_B)

    def selected(self, batch: ScoredBatch) -> Tensor:
        """Returns the samples of the pairs, in their order in the batch; of equal rewards that of
        the lowest sample number. The first sample alone where there is no pair.
        """
        is_lost_B = self.uninformative(batch).numpy()
        reward_B, group_B = batch.reward_B.numpy(), batch.group_B.numpy()
        found = []
        for key_B in (-reward_B, reward_B):
            order_B = np.lexsort((batch.sample_ids_B.numpy(), key_B, group_B))
            order_B = order_B[~is_lost_B[order_B]]
            found.append(order_B[np.unique(group_B[order_B], return_index=True)[1]])
        index = np.sort(np.concatenate(found))
        return torch.from_numpy(index) if len(index) else torch.zeros(1, dtype=torch.int64)

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Returns the samples of the pairs with minus the loss's derivative by each response; zero
        where there is no pair.
        """
        batch = batch.select(self.selected(batch))
        if bool(self.uninformative(batch).any()):
            zeros_T = torch.zeros(batch.num_tokens)
            return batch.join_columns(Producer.here(self.name), advantages_T=zeros_T)
        return super().advantages(batch)
