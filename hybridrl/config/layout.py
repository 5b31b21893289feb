"""The section `layout`: who chooses the layout, and what the choice is told of lengths. No torch.

Owns which keys `layout: auto` chooses. A key that the configuration writes is kept.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from hybridrl.config.lists import Texts
from hybridrl.config.section import Section

CHOSEN_KEYS = (
    "train.tp",
    "train.pp",
    "train.cp",
    "train.ep",
    "train.recompute",
    "train.offload_optimizer",
    "train.micro_batch_tokens",
    "rollout.tp",
    "rollout.ep",
)
"""Keys that `layout: auto` chooses; `train.order=auto`, the default, is chosen at every start."""


class LayoutConfig(Section):
    """Who chooses the layout. `layout: auto` alone stands for `choose: auto`."""

    choose: Literal["config", "auto"] = "config"
    """'auto': train.tp, pp, cp, ep, recompute, offload_optimizer, micro_batch_tokens and rollout.tp, ep are those of the shortest predicted step that fits, but for keys that are written. 'config': a run takes what is written."""
    mean_prompt_tokens: int | None = Field(None, ge=1)
    """Tokens of a usual prompt, for predicted times and usual memory. None: data.max_prompt_tokens, since data is not read for a plan."""
    mean_response_tokens: int | None = Field(None, ge=1)
    """Tokens of a usual response, for predicted times and usual memory. None: rollout.max_new_tokens, the longest; whether a run fits is judged for any lengths."""
    chosen_for: int | None = Field(None, ge=1)
    """Ranks that a run's layout was chosen for; runs write it into their config.yaml. None: nothing was chosen yet."""
    chosen_keys: Texts = ()
    """Keys that were chosen then, all others of them were written. Empty: nothing was chosen yet."""

    def is_open(self, world_size: int) -> bool:
        """Whether a layout is still to be chosen for so many ranks."""
        return self.choose == "auto" and self.chosen_for != world_size


def _as_section(value: object) -> object:
    return {"choose": value} if isinstance(value, str) else value


Layout = Annotated[LayoutConfig, BeforeValidator(_as_section)]
