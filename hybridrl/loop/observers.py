"""Observers of a run, which the trainer calls at fixed points of its loop. All ranks have the same
observers in the same order, so each call may be collective.
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
    """A finished step: its samples, those used in training, and metrics that may be extended."""

    number: int
    scored: ScoredBatch
    batch: TrainBatch
    metrics: dict[str, float]


class Observer:
    """Receives calls at fixed points of a run, in the order of these methods."""

    def fit_begins(self, first: int, last: int) -> None:
        """Called when training starts, after step `first`. Training will end with step `last`."""

    def around_step(self, number: int) -> AbstractContextManager[None]:
        """Returns a context manager around a step of `fit`."""
        return nullcontext()

    def step_begins(self, number: int) -> None:
        """Called when a step begins."""

    def weights_changed(self, number: int) -> None:
        """Called after the optimizer step, before the engine receives the new weights."""

    def step_ends(self, record: StepRecord) -> None:
        """Called when the step has ended and the engine has the new weights."""

    def measures(self, number: int, last: int) -> dict[str, float]:
        """Returns additional metrics after a step, or before the first step."""
        return {}

    def step_recorded(self, number: int, metrics: Mapping[str, float]) -> None:
        """Called when all metrics are known, even if a signal arrived during `measures`."""

    def step_is_over(self, number: int, last: int, metrics: Mapping[str, float]) -> None:
        """Called before the next step, or before training ends if `number` is `last`."""

    def fit_ends(self) -> None:
        """Called when all steps are finished."""


def last_step(num_steps: int | None, until: int | None, done: int, default: int) -> int:
    """Returns the last step for the arguments of `Trainer.fit`; UserError if they conflict."""
    for name, value in (("num_steps", num_steps), ("until", until)):
        if value is not None and value < 0:
            raise UserError(f"fit({name}=...)", value, "at least 0", f"Change {name}.")
    if num_steps is not None and until is not None:
        both = f"num_steps={num_steps} and until={until}"
        remedy = (
            "Remove num_steps, which counts from the current step, or until, which counts from 0."
        )
        raise UserError("fit", both, "num_steps or until, not both", remedy)
    if num_steps is not None:
        return done + num_steps
    return default if until is None else until


def is_due(every: int, step: int, last: int) -> bool:
    """Whether an event is due after this step: every `every` steps (0: never), and at the end."""
    return step == last or (every > 0 and step % every == 0)
