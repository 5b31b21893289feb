"""Maps between the samples of a batch and their sequences.

Most samples are one sequence of tokens. A sample from an agent may consist of several sequences,
such as the conversations of subagents, or a conversation before and after its context was
compacted. The sequences of a sample are consecutive in a batch. Rewards, advantages and metrics
have one value per sample; models and losses read sequences. Sizes: E samples, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SampleSequences:
    """Maps values of samples to values of sequences, and back.

    `counts_E` are the numbers of sequences of each sample, (E,) int64; None if all are 1.
    """

    counts_E: Tensor | None

    @staticmethod
    def of(sample_ids_B: Tensor, sequence_B: Tensor | None) -> SampleSequences:
        if sequence_B is None:
            return SampleSequences(None)
        return SampleSequences(sample_ids_B.unique_consecutive(return_counts=True)[1])

    @cached_property
    def last_E(self) -> Tensor:
        """Index of the last sequence of each sample; do not call if `counts_E` is None."""
        assert self.counts_E is not None
        return self.counts_E.cumsum(0) - 1

    def of_samples(self, value_B: Tensor) -> Tensor:
        """Returns the value of each sample's last sequence: (E,)."""
        return value_B if self.counts_E is None else value_B[self.last_E]

    def summed(self, value_B: Tensor) -> Tensor:
        """Returns the sum over each sample's sequences, in the dtype of the values: (E,)."""
        if self.counts_E is None:
            return value_B
        index_B = torch.repeat_interleave(self.counts_E)
        zeros_E = torch.zeros(len(self.counts_E), dtype=value_B.dtype)
        return zeros_E.index_add(0, index_B, value_B)

    def of_sequences(self, value_E: Tensor) -> Tensor:
        """Returns each sample's value for all its sequences: (B,)."""
        return value_E if self.counts_E is None else value_E.repeat_interleave(self.counts_E)

    def part_sizes(self, sizes: list[int]) -> list[int]:
        """Returns the number of sequences in consecutive parts with these numbers of samples."""
        if self.counts_E is None:
            return sizes
        return [int(part_E.sum()) for part_E in self.counts_E.split(sizes)]


@dataclass(frozen=True, eq=False, kw_only=True)
class SampleValues:
    """Values of a batch per sample: lengths summed over its sequences, `finished_B` of the last."""

    sample_ids_B: Tensor
    group_B: Tensor
    reward_B: Tensor
    reward_parts: Mapping[str, Tensor]
    response_lengths_B: Tensor
    finished_B: Tensor

    @property
    def num_samples(self) -> int:
        return len(self.sample_ids_B)
