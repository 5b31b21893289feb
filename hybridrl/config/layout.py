"""The section `layout`: whether the layout is chosen automatically, and the usual lengths for that
choice. No torch.

Owns the list of keys that `layout: auto` chooses. Keys that the configuration sets are kept.
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
"""Keys that `layout: auto` chooses. `train.order=auto`, the default, is chosen at every start."""


class LayoutConfig(Section):
    """Whether the layout is chosen automatically. `layout: auto` is short for `layout.choose:
    auto`.
    """

    choose: Literal["config", "auto"] = "config"
    """'auto' chooses train.tp, pp, cp, ep, recompute, offload_optimizer, micro_batch_tokens and rollout.tp, ep for the shortest predicted step that fits, except for keys that are set. The default 'config' uses the configuration's values."""
    mean_prompt_tokens: int | None = Field(None, ge=1)
    """Tokens of a usual prompt, for predicted times and usual memory. The default is data.max_prompt_tokens, because a plan does not read the data."""
    mean_response_tokens: int | None = Field(None, ge=1)
    """Tokens of a usual response, for predicted times and usual memory. The default is rollout.max_new_tokens, the longest; whether a run fits is judged for any lengths."""
    chosen_for: int | None = Field(None, ge=1)
    """Number of ranks for which the layout was chosen; runs write it into their config.yaml. It is null until a layout is chosen."""
    chosen_keys: Texts = ()
    """Keys that were chosen then; all others were set by the configuration. It is empty until a layout is chosen."""

    def is_open(self, world_size: int) -> bool:
        """Whether a layout must still be chosen for this number of ranks."""
        return self.choose == "auto" and self.chosen_for != world_size


def _as_section(value: object) -> object:
    return {"choose": value} if isinstance(value, str) else value


Layout = Annotated[LayoutConfig, BeforeValidator(_as_section)]
