"""Mistral (7B, Nemo, Small): all layers attend within a window, or none does."""

from __future__ import annotations

from typing import Any

from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.reading import size
from hybridrl.models.families.rotary import rope_keywords
from hybridrl.models.family import Family, HfConfig, ModelShape
from hybridrl.models.hf.config_keys import DECODER_KEYS

DEFAULT_WINDOW = 4096  # of transformers' MistralConfig where the key is absent; null: none


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; a config without key-value heads means transformers' default of 8."""
    window = _window(hf_config)
    # It is of all layers, whatever `layer_types` says in transformers; engines follow that key.
    kinds = {"sliding_attention" if window else "full_attention"}
    plain = {key: value for key, value in hf_config.items() if key != "sliding_window"}
    return decoder_shape(plain, default_kv_heads=8, window=window, kinds=kinds)


def _window(hf_config: HfConfig) -> int | None:
    """Returns how many positions a query attends to, its own with them; None: all."""
    has_none = hf_config.get("sliding_window", DEFAULT_WINDOW) is None
    return None if has_none else size(hf_config, "sliding_window", DEFAULT_WINDOW)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of TransformerConfig."""
    return decoder_config(hf_config, shape(hf_config))


FAMILY = Family(
    "mistral",
    ("MistralForCausalLM",),
    shape,
    transformer_config,
    rope_keywords,
    decoder_rows,
    config_keys=DECODER_KEYS | {"sliding_window"},
)
