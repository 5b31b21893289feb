"""The section `layout`: automatic choice of a layout, and typical lengths for it. No torch."""

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
    "train.optimizer_memory",
    "train.micro_batch_tokens",
    "rollout.tp",
    "rollout.ep",
)
"""Keys that `layout: auto` chooses. `train.order` is not among them: its default, `auto`, is resolved at every start."""


class LayoutConfig(Section):
    """Automatic choice of the layout. `layout: auto` is short for `layout.choose: auto`."""

    choose: Literal["config", "auto"] = "config"
    """With 'auto', values are chosen for train.tp, pp, cp, ep, recompute, optimizer_memory, micro_batch_tokens and for rollout.tp, ep, so that the predicted step time is shortest and the run fits into memory; keys that are set explicitly are not changed. With the default, 'config', the configuration's values are used."""
    mean_prompt_tokens: int | None = Field(None, ge=1)
    """Typical length of a prompt in tokens, used to predict times and typical memory. The default is data.max_prompt_tokens, because a plan does not read the data."""
    mean_image_tokens: int | None = Field(None, ge=0)
    """Typical number of a prompt's tokens that belong to images, used to predict times and typical memory of models that read images. The default is one image of data.max_image_pixels, or a whole prompt if that is shorter."""
    mean_response_image_tokens: int | None = Field(None, ge=0)
    """Typical number of a response's tokens that belong to images that an environment or an agent shows, used to predict times and typical memory of models that read images. By default none are counted, because a plan cannot know them."""
    mean_response_tokens: int | None = Field(None, ge=1)
    """Typical length of a response in tokens, used to predict times and typical memory. The default is the maximum, rollout.max_new_tokens. Whether a run fits into memory is always decided for the maximum lengths."""
    chosen_for: int | None = Field(None, ge=1)
    """Number of ranks for which the layout was chosen. Runs write it into their config.yaml; it is null until a layout has been chosen."""
    chosen_keys: Texts = ()
    """Keys that were chosen automatically; all other keys were set in the configuration. It is empty until a layout has been chosen."""

    def is_open(self, world_size: int) -> bool:
        """Whether a layout must still be chosen for this number of ranks."""
        return self.choose == "auto" and self.chosen_for != world_size


def _as_section(value: object) -> object:
    return {"choose": value} if isinstance(value, str) else value


Layout = Annotated[LayoutConfig, BeforeValidator(_as_section)]
