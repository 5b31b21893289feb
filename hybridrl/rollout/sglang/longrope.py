"""Fixes SGLang's longrope: uses one table of angles for all positions in all batches."""

from __future__ import annotations

from typing import Any

import torch

from hybridrl.errors import ModelError


def settle_longrope(model: torch.nn.Module, version: str) -> None:
    """Makes every position use one table of angles; must run before CUDA graphs are captured.

    If any position in a batch exceeds the original length, SGLang (0.5.16 to 0.5.23) uses the long
    factors for the whole batch, so that a request's result depends on other requests. A run uses
    only one set of factors (models/families/by_length.py). Raises ModelError if both sets differ.
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
