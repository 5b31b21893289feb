"""Decides whether samples read a shared prompt's keys in place instead of in copies. No torch."""

from __future__ import annotations

from hybridrl.models.family import ModelShape

# Keys are read in place if the samples of a micro-batch share at least so many tokens each, on
# average: all tokens of a prompt of 4,096 but the last, from which each sample predicts its own
# next token. A layer with 12 heads then takes as long or less
# (benchmarks/results/prefix_attention_h200.json); for shorter prompts, the second call and the
# merge cost more than copies.
LEAST_SHARED = 4096 - 1


def reads_in_place(shape: ModelShape, cp: int) -> bool:
    """Whether transformer-engine's attention can read long prompts in place in all layers."""
    is_plain = shape.latent is None and shape.window is None and not shape.attention_sinks
    return cp == 1 and is_plain and not shape.torch_only
