"""Interface of algorithms: the columns that they need, advantages, denominator and loss.

An algorithm receives log-probabilities of tokens, never logits. On every rank `advantages` and
`denominator` receive the per-sample columns of the whole step, but token columns only for the
samples that this rank trains on (contracts/batch.py); over_tokens.py computes statistics over the
tokens on all ranks. `loss` receives one micro-batch on one context-parallel rank. Invariant: the
sum of a mini-batch's gradients does not depend on how the mini-batch is split into micro-batches
and over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from torch import Tensor

from hybridrl.config.needs import Needs
from hybridrl.contracts.batch import MicroBatch, ScoredBatch, TrainBatch


@dataclass(frozen=True)
class LossOutput:
    """Loss of one micro-batch.

    Args:
        loss: Scalar with a gradient, already divided by the global denominator. The mini-batch's
            loss is the plain sum of these losses over micro-batches and ranks.
        metrics: Detached scalars, each a sum over positions. The trainer adds up the sums and
            divides by the number of response tokens, not by the denominator. If a name ends in
            `_max`, the trainer takes the maximum instead.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """Methods that every algorithm has."""

    @property
    def name(self) -> str:
        """Name to show in messages."""

    @property
    def needs(self) -> Needs:
        """Columns and models that the trainer must provide."""

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Returns the batch with `advantages_T`, and `returns_T` for a critic; collective."""

    def denominator(self, batch: TrainBatch) -> float:
        """Returns the divisor for the summed loss of this mini-batch, counted over all ranks."""

    def loss(
        self, logp_S: Tensor, entropy_S: Tensor, micro: MicroBatch, denominator: float
    ) -> LossOutput:
        """Returns the policy's loss over the positions of a micro-batch.

        Args:
            logp_S: Log-probability of each position's target token under the policy, with a
                gradient. With `needs.teacher_top` it has shape (S, K) and the tokens are
                `micro.teacher_tokens_SK`.
            entropy_S: Entropy of the policy at each position, in nats.
            micro: Columns at the same positions. Only positions in `loss_mask_S` may contribute.
            denominator: Result of `denominator` for the whole mini-batch.
        """


@runtime_checkable
class AdaptiveAlgorithm(Algorithm, Protocol):
    """An algorithm with a state that changes once per step and is saved in checkpoints."""

    def after_step(self, batch: TrainBatch) -> dict[str, float]:
        """Updates the state from the step's batch; returns metrics, equal on all ranks."""

    def state(self) -> dict[str, float]:
        """Returns the state for `load_state`, as values that JSON can represent."""

    def load_state(self, state: Mapping[str, float]) -> None:
        """Restores a state."""


@runtime_checkable
class GroupAlgorithm(Algorithm, Protocol):
    """An algorithm that cannot learn from some groups of samples."""

    @property
    def max_resampling(self) -> int:
        """Maximum number of rounds in which new prompts replace uninformative groups."""

    def uninformative(self, batch: ScoredBatch) -> Tensor:
        """Returns a mask of the samples in uninformative groups, whole groups: (B,) bool."""


@runtime_checkable
class SelectiveAlgorithm(Algorithm, Protocol):
    """An algorithm that learns from only some of a step's samples."""

    def selected(self, batch: ScoredBatch) -> Tensor:
        """Returns the indices of the samples from which to learn, at least one: (N,) int64.
        `advantages` accepts both the whole batch and the selected samples.
        """


@runtime_checkable
class CriticAlgorithm(Algorithm, Protocol):
    """An algorithm that also trains a critic."""

    def value_loss(self, values_S: Tensor, micro: MicroBatch, denominator: float) -> LossOutput:
        """Returns the critic's loss. Arguments as in `loss`; `values_S` has a gradient."""


def num_response_tokens(batch: TrainBatch) -> float:
    """Returns the number of response tokens, which is the denominator of a mean over them."""
    return float(batch.response_lengths_B.sum())
