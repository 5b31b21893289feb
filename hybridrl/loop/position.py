"""Tracks the position of a run: finished steps, elapsed time, next prompts and random states. An
interrupted step is repeated from its beginning with the same prompts and random states.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.checkpoint.random_states import rng_state, set_rng_state
from hybridrl.data.prompts import PromptSource
from hybridrl.roles.mix import Mix


class Position:
    """Counts steps and seconds, and records the consumed data. `has_begun` prevents loading."""

    def __init__(self, prompts: PromptSource, mix: Mix) -> None:
        self._prompts, self._mix = prompts, mix
        self.step, self.seconds, self.has_begun = 0, 0.0, False
        self._since = time.monotonic()
        self._began: tuple[dict[str, Any], dict[str, torch.Tensor]] | None = None

    def start_clock(self) -> None:
        self._since = time.monotonic()

    def stop_clock(self) -> float:
        """Adds the seconds since `start_clock`. Returns the total over all starts of the run."""
        self.seconds = self.all_seconds()
        return self.seconds

    def all_seconds(self) -> float:
        return self.seconds + time.monotonic() - self._since

    @property
    def is_in_step(self) -> bool:
        return self._began is not None

    def begin_step(self) -> None:
        self._began, self.has_begun = (self._cursors(), rng_state()), True

    def end_step(self) -> None:
        self._began = None
        self.step += 1

    def rewind(self) -> None:
        """Returns to the beginning of the current step, if there is one."""
        if self._began is not None:
            cursors, states = self._began
            set_rng_state(states)
            self.load(cursors)

    def state(self) -> dict[str, Any]:
        """Returns the data cursors at the current step's beginning, as JSON for a checkpoint."""
        return self._cursors() if self._began is None else self._began[0]

    def load(self, cursors: Mapping[str, Any]) -> None:
        self._began = None
        self._prompts.load_state(cursors["prompts"])
        self._mix.load_state(cursors["mix"])

    def _cursors(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state(), "mix": self._mix.state()}
