"""Replaces rotary frequencies that vary with the sequence length by fixed ones.

transformers and engines behave differently. With `longrope`, transformers (5.19) uses the long
factors in each forward pass in which the longest row exceeds the original length. vLLM (0.32) uses
the long factors for all sequences if `max_model_len` exceeds the original length, and otherwise for
none. Keys that were cached with short factors would be wrong once long factors apply. A run
therefore uses only one kind of factor, chosen as in vLLM. With `dynamic`, both libraries use
unscaled positions up to `max_position_embeddings`; beyond that, transformers scales by the length
of each forward pass, and vLLM does not scale. Does not import torch.

Invariant: with a config returned by `at_length`, training, engines and transformers use the same
angles in every forward pass over sequences up to that length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hybridrl.errors import ModelError
from hybridrl.models.families.reading import size
from hybridrl.models.families.rotary import (
    DEFAULT_ORIGINAL_LENGTH,
    LONG,
    ORIGINAL,
    ROPE_KEYS,
    SHORT,
    VARYING,
    rope_kind,
    rope_parameters,
)
from hybridrl.models.family import HfConfig

ROPE_HOLDERS = ("rope_parameters", "rope_scaling")


def at_length(hf_config: HfConfig, longest: int | None) -> HfConfig:
    """Returns a config.json with one set of rotary frequencies for sequences up to `longest`.

    Args:
        longest: Length of the run's longest sequence. May be None if rotary frequencies never
            depend on the sequence length.

    Raises ModelError if the longest sequence exceeds `max_position_embeddings`.
    """
    rope, key = rope_parameters(hf_config)
    kind = rope_kind(rope)
    if kind not in VARYING:
        return hf_config
    if longest is None:
        raise ValueError(f"positions of kind {kind} need the length of the longest sequence")
    most = size(hf_config, "max_position_embeddings")
    if longest > most:
        raise ModelError(
            f"config.json: {key}.rope_type",
            f"{kind}, with sequences of up to {longest} tokens",
            f"sequences of at most max_position_embeddings = {most} tokens; beyond that, "
            "transformers and engines use different angles",
            "Lower data.max_prompt_tokens or the maximum response length.",
        )
    plain = {name: value for name, value in rope.items() if name != "type"}
    if kind == "dynamic":
        kept = {name: value for name, value in plain.items() if name in ROPE_KEYS}
        fixed: Mapping[str, Any] = {**kept, "rope_type": "default"}
    else:
        factors = plain[LONG if takes_long(hf_config, longest) else SHORT]
        fixed = {**plain, "rope_type": kind, SHORT: factors, LONG: factors}
    return {**hf_config, **{name: fixed for name in ROPE_HOLDERS if hf_config.get(name)}}


def takes_long(hf_config: HfConfig, longest: int) -> bool:
    """Returns whether the model uses longrope and sequences may exceed its original length."""
    is_longrope = rope_kind(rope_parameters(hf_config)[0]) == "longrope"
    return is_longrope and longest > size(hf_config, ORIGINAL, DEFAULT_ORIGINAL_LENGTH)


def positions_summary(hf_config: HfConfig, longest: int) -> str | None:
    """Returns a log line about longrope's factors; None if the model does not use longrope."""
    rope, _ = rope_parameters(hf_config)
    if rope_kind(rope) != "longrope":
        return None
    original = size(hf_config, ORIGINAL, DEFAULT_ORIGINAL_LENGTH)
    if not takes_long(hf_config, longest):
        return (
            f"longrope's short factors: sequences have at most {longest} tokens, not more than "
            f"{original}"
        )
    return (
        f"longrope's long factors, also for short sequences: sequences may have {longest} tokens, "
        f"more than {original}. To serve the trained model with vLLM, set max_model_len above "
        f"{original}; otherwise, and in transformers for shorter sequences, it uses short factors"
    )
