"""Rotary positions that depend on a sequence's length, fixed for a run by its longest sequence.

transformers and engines choose differently. With `longrope`, transformers (5.19) uses the long
factors in a forward pass whose longest row exceeds the original length. vLLM (0.32) uses them for
every sequence if `max_model_len` exceeds it, else for none. Keys cached under the short factors are
wrong under the long ones, so a run has one kind of factors, chosen as in vLLM. With `dynamic`, both
use unscaled positions up to `max_position_embeddings`; beyond that transformers scales by the
length of each forward pass, and vLLM does not scale. No torch.

Invariant: a config returned by `at_length` gives the same angles in every forward pass of sequences
up to that length, in training, in each engine and in transformers.
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
    """Returns a config.json with positions that do not depend on a sequence's length.

    Args:
        hf_config: Content of config.json, already checked by its family.
        longest: Tokens of the run's longest sequence; may be None for other kinds of positions.

    Raises:
        ModelError: Sequences may be longer than `max_position_embeddings`.
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
            "Lower data.max_prompt_tokens or the longest response.",
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
    """Returns whether a run's sequences may exceed longrope's original length."""
    is_longrope = rope_kind(rope_parameters(hf_config)[0]) == "longrope"
    return is_longrope and longest > size(hf_config, ORIGINAL, DEFAULT_ORIGINAL_LENGTH)


def positions_summary(hf_config: HfConfig, longest: int) -> str | None:
    """Returns a log line about longrope's factors; None for other positions."""
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
        f"longrope's long factors, for short sequences too: sequences may have {longest} tokens, "
        f"more than {original}. Serve the trained model with a max_model_len above {original} in "
        "vLLM; with less, and in transformers for shorter sequences, it would use its short factors"
    )
