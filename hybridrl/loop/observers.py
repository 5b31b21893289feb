"""Observers of a run: metrics, records, copies, evaluation, checkpoints.

The trainer calls them at named points of its loop. All ranks have the same observers in the same
order, so each point may be collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybridrl.errors import UserError

if TYPE_CHECKING:
    from hybridrl.contracts.batch import ScoredBatch, TrainBatch


@dataclass(frozen=True)
class StepRecord:
    """A step that was taken.

    Args:
        number: Number of the step, from 1.
        scored: All samples of the step, as they were scored.
        batch: Samples that were learned from, with all columns.
        metrics: Metrics so far; observers add to them.
    """

    number: int
    scored: ScoredBatch
    batch: TrainBatch
    metrics: dict[str, float]


class Observer:
    """Is called at the points of a run, in the order of these methods."""

    def fit_begins(self, first: int, last: int) -> None:
        """Training goes on after step `first`, up to step `last`."""

    def around_step(self, number: int) -> AbstractContextManager[None]:
        """Returns a context for a step of `fit`."""
        return nullcontext()

    def step_begins(self, number: int) -> None:
        """A step begins."""

    def weights_changed(self, number: int) -> None:
        """The optimizer has stepped; the engine has the old weights, and its memory is free."""

    def step_ends(self, record: StepRecord) -> None:
        """The step is over and the engine has the new weights."""

    def measures(self, number: int, last: int) -> dict[str, float]:
        """Returns further metrics after a step, or before the first one."""
        return {}

    def step_recorded(self, number: int, metrics: Mapping[str, float]) -> None:
        """All metrics are known; also called if a stop came while observers measured."""

    def step_is_over(self, number: int, last: int, metrics: Mapping[str, float]) -> None:
        """The next step may begin, or training ends with this one where `number` is `last`."""

    def fit_ends(self) -> None:
        """All steps were taken."""


def last_step(num_steps: int | None, until: int | None, done: int, default: int) -> int:
    """Returns the step to train to, for these arguments of `Trainer.fit`.

    Args:
        num_steps: Further steps.
        until: Step to end with.
        done: Number of finished steps.
        default: Step to end with where neither is given.

    Raises:
        UserError: Both are given, or one is negative.
    """
    for name, value in (("num_steps", num_steps), ("until", until)):
        if value is not None and value < 0:
            raise UserError(f"fit({name}=...)", value, "a number from 0", "Change it.")
    if num_steps is not None and until is not None:
        both = f"num_steps={num_steps} and until={until}"
        raise UserError("fit", both, "one of them", "num_steps counts from here, until from 0.")
    if num_steps is not None:
        return done + num_steps
    return default if until is None else until


def is_due(every: int, step: int, last: int) -> bool:
    """Whether what happens after every `every` steps (0: never) and after the last is due now."""
    return step == last or (every > 0 and step % every == 0)
