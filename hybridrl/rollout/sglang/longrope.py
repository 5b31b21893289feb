"""SGLang's longrope: one table of angles for all positions, whatever else is in a batch."""

from __future__ import annotations

from typing import Any

import torch

from hybridrl.errors import ModelError


def settle_longrope(model: torch.nn.Module, version: str) -> None:
    """Makes every position read its own row of the table up to the longest one.

    SGLang takes the table of long factors for a whole batch once a position in it is beyond the
    original length, and lays it behind that of short ones: a request would depend on what runs
    beside it, and position `original_max_position_embeddings` alone reads the row of position 0
    (0.5.12 to 0.5.16). A run has one set of factors (models/families/by_length.py), so one table
    holds all. Before graphs are captured.

    Args:
        model: SGLang's, loaded; nothing is done where its positions are others.
        version: SGLang's, for the message.

    Raises:
        ModelError: short and long factors differ.
    """
    for name, part in model.named_modules():
        if not hasattr(part, "long_short_cos_sin_cache"):
            continue
        rope: Any = part
        if list(rope.short_factor) != list(rope.long_factor):
            raise ModelError(
                f"config.json: short_factor and long_factor, at {name} of {version}",
                "others",
                "the same, as a run has them for all its sequences",
                "Start the engine with the config that the trainer computes.",
            )
        rope.long_short_cos_sin_cache = rope.long_cos_sin_cache
        rope.original_max_position_embeddings = 0  # where the table begins
