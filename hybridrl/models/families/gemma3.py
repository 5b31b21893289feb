"""Gemma 3 (text): like Gemma 2, but queries and keys are normalized instead of soft-capped.

Layers with windows use local rotary positions. Other layers use global rotary positions, which may
be scaled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybridrl.models.families.gemma2 import (
    FULL,
    GEMMA_KEYS,
    ROPES,
    WINDOWED,
    embedding_scale,
    filled,
    gemma_config,
    gemma_rows,
    gemma_shape,
)
from hybridrl.models.families.reading import number, refusal, require, size
from hybridrl.models.families.rotary import read_rotary, rope_keywords, rope_parameters
from hybridrl.models.family import Family, HfConfig, ModelShape

GLOBAL_BASE, LOCAL_BASE = 1e6, 1e4  # transformers' Gemma3TextConfig
PATTERN = "sliding_window_pattern"


def _every(hf_config: HfConfig) -> int:
    # When transformers saves a config, it writes `layer_types` and renames this key.
    return size(hf_config, PATTERN, 6)


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; the defaults come from transformers' Gemma3TextConfig."""
    # transformers and engines ignore this cap.
    require(hf_config, "attn_logit_softcapping", None, (None,))
    require(hf_config, "use_bidirectional_attention", False, (False,))
    return gemma_shape(filled(hf_config, {}), _every(hf_config), qk_norm=True)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    whole = filled(hf_config, {})
    return gemma_config(whole, shape(hf_config), _every(hf_config))


def model_keywords(hf_config: HfConfig) -> dict[str, Any]:
    global_config, local_config = _both_ropes(hf_config)
    keywords = rope_keywords(global_config, ROPES)
    keywords["rotary"] = replace(keywords["rotary"], local=read_rotary(local_config, ROPES))
    return keywords | {"scales": embedding_scale(hf_config)}


def _both_ropes(hf_config: HfConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a config with global rotary positions, and one with local rotary positions.

    The positions are read from two objects in `rope_parameters` (transformers 5), or from the older
    keys `rope_theta`, `rope_scaling` (global only) and `rope_local_base_freq`.
    """
    plain = {key: value for key, value in hf_config.items() if not key.startswith("rope_")}
    plain.setdefault("max_position_embeddings", 131_072)
    theta = number(hf_config, "rope_theta", GLOBAL_BASE, 1, 1e15)
    local = number(hf_config, "rope_local_base_freq", LOCAL_BASE, 1, 1e15)
    given = hf_config.get("rope_parameters")
    if not isinstance(given, Mapping) or not {FULL, WINDOWED} & set(given):
        rope, key = rope_parameters(hf_config)
        if key == "rope_parameters" and rope:
            raise refusal(key, rope, f"an object with {FULL} and {WINDOWED}, or rope_scaling")
        scaled = {**plain, "rope_theta": theta, "rope_scaling": rope or None}
        return scaled, {**plain, "rope_theta": local}
    if hf_config.get("rope_scaling"):
        raise refusal("rope_scaling", hf_config["rope_scaling"], "null with rope_parameters")
    for key in sorted(given):
        if key not in (FULL, WINDOWED):
            raise refusal(f"rope_parameters.{key}", given[key], f"only {FULL} and {WINDOWED}")
    return (
        {**plain, "rope_theta": theta, "rope_parameters": given.get(FULL)},
        {**plain, "rope_theta": local, "rope_parameters": given.get(WINDOWED)},
    )


FAMILY = Family(
    "gemma3_text",
    ("Gemma3ForCausalLM",),
    shape,
    transformer_config,
    model_keywords,
    gemma_rows,
    config_keys=GEMMA_KEYS | {PATTERN, "rope_local_base_freq", "use_bidirectional_attention"},
)
