"""What an algorithm is: which columns it needs, its advantages, its denominator and its loss.

An algorithm sees per-token log-probabilities, never logits. In `advantages` and `denominator` it
sees the per-sample columns of the whole step on every rank, and the token columns of the samples
that this rank trains on (batch.py); what it says of all tokens it takes from over_tokens.py. In
`loss` it sees one micro-batch (of one context-parallel rank). So it must give the same gradient
however the batch is cut. Owns no tensor.
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
    """What a loss returns for one micro-batch.

    Args:
        loss: scalar with a gradient, already divided by the global denominator; the batch's loss
            is the plain sum over micro-batches and ranks.
        metrics: detached scalars. Sums over positions, to be added up and divided by the number of
            response tokens, whatever the denominator is; a name that ends in `_max` is a maximum
            instead.
    """

    loss: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


class Algorithm(Protocol):
    """What the trainer calls; see the module for who sees what."""

    @property
    def name(self) -> str:
        """The name in messages."""
        ...

    @property
    def needs(self) -> Needs:
        """What must be computed for it."""
        ...

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Returns the step's batch with `advantages_T` (and `returns_T` for a critic) filled; all
        ranks call.
        """
        ...

    def denominator(self, batch: TrainBatch) -> float:
        """Returns what the losses of this mini-batch are divided by, all ranks' samples counted."""
        ...

    def loss(
        self, logp_S: Tensor, entropy_S: Tensor, micro: MicroBatch, denominator: float
    ) -> LossOutput:
        """Returns the policy's loss on the positions of a micro-batch.

        Args:
            logp_S: log-probability of each position's target under the policy, with a gradient; an
                algorithm with `needs.teacher_top` gets those of `micro.teacher_tokens_SK`, (S, K).
            entropy_S: entropy of the policy at each position, nats.
            micro: the columns at the same positions; only `loss_mask_S` may count.
            denominator: as `denominator` gave it for the whole mini-batch.
        """
        ...


@runtime_checkable
class AdaptiveAlgorithm(Algorithm, Protocol):
    """An algorithm with a state: it changes once a step, and is part of a checkpoint."""

    def after_step(self, batch: TrainBatch) -> dict[str, float]:
        """Takes in the step's batch after its updates; returns metrics, the same on all ranks."""
        ...

    def state(self) -> dict[str, float]:
        """Returns what `load_state` needs, for JSON."""
        ...

    def load_state(self, state: Mapping[str, float]) -> None:
        """Goes on from a state."""
        ...


@runtime_checkable
class GroupAlgorithm(Algorithm, Protocol):
    """An algorithm that learns nothing from some groups of samples."""

    @property
    def max_resampling(self) -> int:
        """Rounds in which such groups are replaced by further prompts'."""
        ...

    def uninformative(self, batch: ScoredBatch) -> Tensor:
        """Returns which samples are in such groups, all of a group or none: (B,) bool."""
        ...


@runtime_checkable
class SelectiveAlgorithm(Algorithm, Protocol):
    """An algorithm that learns from some of a step's samples only."""

    def selected(self, batch: ScoredBatch) -> Tensor:
        """Returns the indices of those samples, at least one: (N,) int64. `advantages` takes either
        the whole batch or these alone.
        """
        ...


@runtime_checkable
class CriticAlgorithm(Algorithm, Protocol):
    """An algorithm that also trains a critic."""

    def value_loss(self, values_S: Tensor, micro: MicroBatch, denominator: float) -> LossOutput:
        """Returns the critic's loss; arguments as in `loss`, `values_S` with a gradient."""
        ...


def num_response_tokens(batch: TrainBatch) -> float:
    """Returns the denominator of a mean over all response tokens of a mini-batch."""
    return float(batch.response_lengths_B.sum())
