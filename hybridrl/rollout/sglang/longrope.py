"""Repair of SGLang's longrope: one table of angles for all positions, independent of the batch."""

from __future__ import annotations

from typing import Any

import torch

from hybridrl.errors import ModelError


def settle_longrope(model: torch.nn.Module, version: str) -> None:
    """Makes every position read its own row of one table, before graphs are captured.

    SGLang (0.5.12 to 0.5.16) uses the table of long factors for a whole batch if any position in it
    exceeds the original length, so that a request depends on others in the batch. A run has one set
    of factors (models/families/by_length.py), so one table is enough. Raises ModelError if short
    and long factors differ.
    """
    for name, part in model.named_modules():
        if not hasattr(part, "long_short_cos_sin_cache"):
            continue
        rope: Any = part
        if list(rope.short_factor) != list(rope.long_factor):
            raise ModelError(
                f"config.json: short_factor and long_factor, at {name} of {version}",
                "different lists",
                "equal lists, since a run uses the same factors for all its sequences",
                "Start the engine with the config that the trainer computes.",
            )
        rope.long_short_cos_sin_cache = rope.long_cos_sin_cache
        rope.original_max_position_embeddings = 0  # first position of the table
