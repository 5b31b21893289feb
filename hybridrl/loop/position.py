"""How far a run has come in its prompts and random states, and the way back to a step's beginning.

A step that was not finished is taken again from its beginning, after a restart or in the same
process: with the same prompts, and with the random states that it began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hybridrl.checkpoint.random_states import rng_state, set_rng_state
from hybridrl.data.prompts import PromptSource
from hybridrl.roles.mix import Mix


class Position:
    """The place of a run in its data.

    Args:
        prompts: that steps take from.
        mix: rows of further terms.
    """

    def __init__(self, prompts: PromptSource, mix: Mix) -> None:
        self._prompts, self._mix = prompts, mix
        self._began: tuple[dict[str, Any], dict[str, torch.Tensor]] | None = None

    @property
    def is_in_step(self) -> bool:
        """Whether a step has begun and is not finished."""
        return self._began is not None

    def begin_step(self) -> None:
        """Notes where a step begins."""
        self._began = self._cursors(), rng_state()

    def end_step(self) -> None:
        """The step under way is finished."""
        self._began = None

    def rewind(self) -> None:
        """Goes back to where the step under way began, if there is one."""
        if self._began is not None:
            cursors, states = self._began
            set_rng_state(states)
            self.load(cursors)

    def state(self) -> dict[str, Any]:
        """Returns cursors for a checkpoint: of the beginning of the step under way; JSON."""
        return self._cursors() if self._began is None else self._began[0]

    def load(self, cursors: Mapping[str, Any]) -> None:
        """Goes to where `state` was; no step is under way then."""
        self._began = None
        self._prompts.load_state(cursors["prompts"])
        self._mix.load_state(cursors["mix"])

    def _cursors(self) -> dict[str, Any]:
        return {"prompts": self._prompts.state(), "mix": self._mix.state()}
