"""Rotary positions that go by a sequence's length, settled for a run by its longest. No torch.

Engines and transformers switch elsewhere. Of `longrope` transformers (5.19) takes the long factors
in a forward whose longest row is beyond the original length; vLLM (0.32) takes them always where
`max_model_len` is beyond it, and never elsewhere. Keys that are cached under the short factors are
wrong under the long ones, so a run has one kind: vLLM's. Of `dynamic` both compute plain positions
up to `max_position_embeddings`; beyond them transformers goes by each forward's length, and vLLM
has none.

Invariant: a config that `at_length` returned gives the same angles in every forward of sequences up
to that length, in training, in each engine and in transformers.
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
    """Returns the config.json whose positions a run computes.

    Args:
        hf_config: the content of config.json, which a family has read.
        longest: tokens of the run's longest sequence; None: no sequence is computed with it, or its
            positions do not go by lengths.

    Raises:
        ModelError: sequences are longer than the model's positions that go by lengths.
    """
    rope, key = rope_parameters(hf_config)
    kind = rope_kind(rope)
    if kind not in VARYING:
        return hf_config
    if longest is None:
        raise ValueError(f"positions of kind {kind}, and nobody says how long sequences are")
    most = size(hf_config, "max_position_embeddings")
    if longest > most:
        raise ModelError(
            f"config.json: {key}.rope_type",
            f"{kind}, with sequences of up to {longest} tokens",
            f"sequences of at most max_position_embeddings = {most} tokens with it: beyond them "
            "transformers and engines turn by other angles",
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
    """Returns whether a run's sequences go beyond longrope's original length."""
    is_longrope = rope_kind(rope_parameters(hf_config)[0]) == "longrope"
    return is_longrope and longest > size(hf_config, ORIGINAL, DEFAULT_ORIGINAL_LENGTH)


def positions_summary(hf_config: HfConfig, longest: int) -> str | None:
    """Returns what to tell about positions that go by lengths; None where there are none."""
    rope, _ = rope_parameters(hf_config)
    if rope_kind(rope) != "longrope":
        return None
    original = size(hf_config, ORIGINAL, DEFAULT_ORIGINAL_LENGTH)
    if not takes_long(hf_config, longest):
        return (
            f"longrope's short factors: no sequence is longer than {original} tokens "
            f"(at most {longest})"
        )
    return (
        f"longrope's long factors, for short sequences too: sequences may have {longest} tokens, "
        f"more than {original}. vLLM computes the same with max_model_len above {original}; with "
        "less, and in transformers for shorter sequences, the trained model gets its short factors"
    )
