"""Mistral (7B, Nemo, Small): either all layers attend within a window, or no layer does."""

from __future__ import annotations

from hybridrl.models.families.decoder import decoder_family, windowed_shape
from hybridrl.models.family import HfConfig, ModelShape

DEFAULT_WINDOW = 4096  # MistralConfig's default for an absent key; null means no window


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; transformers' default is 8 key-value heads."""
    return windowed_shape({"sliding_window": DEFAULT_WINDOW, **hf_config}, default_kv_heads=8)


FAMILY = decoder_family("mistral", "MistralForCausalLM", shape, {"sliding_window"})
