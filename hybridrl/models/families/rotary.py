"""Reads rotary positions from a config.json; rotary_positions.py computes frequencies. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from math import isclose
from typing import Any

from hybridrl.config.files import shown
from hybridrl.errors import MISSING
from hybridrl.models.families.reading import number, refusal, size
from hybridrl.models.family import HfConfig, Rotary

DEFAULT_ROPE_THETA = 10000.0
DEFAULT_ORIGINAL_LENGTH = 4096  # transformers' Phi3Config
SHORT, LONG, ORIGINAL = "short_factor", "long_factor", "original_max_position_embeddings"
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# Required and optional keys for each kind of scaling; other kinds are rejected.
NEEDED: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset({"factor", "original_max_position_embeddings"}),
    "longrope": frozenset({SHORT, LONG}),
}
OPTIONAL: Mapping[str, frozenset[str]] = {
    "yarn": frozenset({"beta_fast", "beta_slow", "mscale", "mscale_all_dim"}),
    "longrope": frozenset({"attention_factor", "factor", ORIGINAL}),
}
# Kinds that llama-shaped families support. Only Phi-3 supports longrope, which needs two keys
# outside of the scaling.
KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
OTHER_NAMES = {"su": "longrope"}  # names that early configs use
# Kinds whose angles depend on sequence length; by_length.py makes them constant for a run.
VARYING = ("dynamic", "longrope")


def rope_keywords(
    hf_config: HfConfig, kinds: tuple[str, ...] = KINDS, default_share: float | None = None
) -> dict[str, Any]:
    """Returns GPTModel's arguments for positions, and `rotary` for build.py; see `read_rotary`."""
    rotary = read_rotary(hf_config, kinds, default_share)
    return {
        "position_embedding_type": "rope",
        "max_sequence_length": size(hf_config, "max_position_embeddings"),
        "rotary_percent": rotary.share,
        "rotary": rotary,
    }


def read_rotary(
    hf_config: HfConfig, kinds: tuple[str, ...] = KINDS, default_share: float | None = None
) -> Rotary:
    """Reads `rope_parameters` (transformers 5), or the older `rope_theta` and `rope_scaling`.

    Args:
        kinds: Kinds of scaling that the family supports.
        default_share: Share of each head that rotates if the config does not set it. If None, whole
            heads rotate, and other shares are rejected.

    Raises ModelError for unsupported kinds and shares, and missing or unknown parameters.
    """
    rope, prefix = rope_parameters(hf_config)
    kind = _checked_kind(rope, prefix, kinds)
    share = _share(hf_config, rope, prefix, default_share)
    theta = number(hf_config, "rope_theta", DEFAULT_ROPE_THETA, 1, 1e15)

    def read(key: str, default: float, least: float, most: float) -> float:
        return number(rope, key, default, least, most, f"{prefix}.")

    base = read("rope_theta", theta, 1, 1e15)
    if kind == "longrope":
        return _longrope(hf_config, rope, prefix, base, share)
    if kind == "default":
        return Rotary(base, share=share)
    factor = read("factor", 1, 1, 1e6)
    # Unscaled up to max_position_embeddings; by_length.py rejects longer sequences.
    if kind == "dynamic":
        return Rotary(base, share=share)
    if kind == "linear":
        return Rotary(base, kind, factor)
    length = size(rope, "original_max_position_embeddings", prefix=f"{prefix}.")
    if kind == "llama3":
        low, high = read("low_freq_factor", 1, 1e-3, 1e6), read("high_freq_factor", 4, 1e-3, 1e6)
        if high <= low:
            raise refusal(f"{prefix}.high_freq_factor", high, f"more than low_freq_factor = {low}")
        return Rotary(base, kind, factor, length, low=low, high=high)
    both = _has_mscales(rope, prefix)
    return Rotary(
        base,
        kind,
        factor,
        length,
        low=read("beta_slow", 1, 1e-3, 1e6),
        high=read("beta_fast", 32, 1e-3, 1e6),
        mscale=read("mscale", 1, 0, 1e3) if both else 1.0,
        mscale_all_dim=read("mscale_all_dim", 0, 0, 1e3) if both else 0.0,
    )


def _checked_kind(rope: Mapping[str, Any], prefix: str, kinds: tuple[str, ...]) -> Any:
    """Returns the kind of scaling, after checking that its parameters have valid keys."""
    kind = rope_kind(rope)
    if kind not in kinds:
        raise refusal(f"{prefix}.rope_type", _written_kind(rope), ", ".join(kinds))
    known = ROPE_KEYS | NEEDED[kind] | OPTIONAL.get(kind, frozenset())
    for key in rope:
        if key not in known and rope[key] is not None:
            raise refusal(f"{prefix}.{key}", rope[key], f"no such key with rope_type {kind}")
    for key in sorted(NEEDED[kind]):
        if rope.get(key) is None:
            raise refusal(f"{prefix}.{key}", MISSING, "a number")
    return kind


def _written_kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def rope_kind(rope: Mapping[str, Any]) -> Any:
    kind = _written_kind(rope)
    return OTHER_NAMES.get(kind, kind) if isinstance(kind, str) else kind


def _longrope(
    hf_config: HfConfig, rope: Mapping[str, Any], prefix: str, base: float, share: float
) -> Rotary:
    """Reads longrope (Ding et al. 2024, "LongRoPE") with the divisors for short sequences.

    The frequency of each pair of dims has its own divisor. One list of divisors is for sequences up
    to the original length, another for longer sequences. transformers reads the original length
    from the top level of the config, and magnitude and factor from the scaling; vLLM computes
    magnitude and factor from the lengths. Both results must agree.
    """
    original = size(hf_config, ORIGINAL, DEFAULT_ORIGINAL_LENGTH)
    most = size(hf_config, "max_position_embeddings")
    if rope.get(ORIGINAL) not in (None, original):
        allowed = f"the same as outside of {prefix}, {original}"
        raise refusal(f"{prefix}.{ORIGINAL}", rope[ORIGINAL], allowed)
    if not 1 < original <= most:
        allowed = f"from 2 to max_position_embeddings = {most}"
        raise refusal(ORIGINAL, original, allowed)
    factors = {key: _divisors(hf_config, rope, key, prefix, share) for key in (SHORT, LONG)}
    rotary = Rotary(
        base, "longrope", most / original, original, share=share, divisors=factors[SHORT]
    )
    for key, value in (("factor", rotary.factor), ("attention_factor", rotary.magnitude)):
        given = number(rope, key, value, 1, 1e6, f"{prefix}.")
        if not isclose(given, value, rel_tol=1e-6):
            allowed = f"{value:.8g}, computed from {ORIGINAL} and max_position_embeddings"
            raise refusal(f"{prefix}.{key}", rope[key], allowed)
    return rotary


def _divisors(
    hf_config: HfConfig, rope: Mapping[str, Any], key: str, prefix: str, share: float
) -> tuple[float, ...]:
    heads = size(hf_config, "num_attention_heads")
    head_dim = size(hf_config, "head_dim", size(hf_config, "hidden_size") // heads)
    count, given = int(head_dim * share) // 2, rope[key]
    allowed = f"a list of {count} numbers above 0, one for each pair of rotated dimensions"
    if not isinstance(given, list) or len(given) != count:
        found = f"{len(given)} numbers" if isinstance(given, list) else given
        raise refusal(f"{prefix}.{key}", found, allowed)
    indexed = {str(index): value for index, value in enumerate(given)}
    return tuple(number(indexed, i, 0, 1e-6, 1e6, f"{prefix}.{key}.") for i in indexed)


def _has_mscales(rope: Mapping[str, Any], prefix: str) -> bool:
    # transformers uses them only if both are set; engines use a default for a missing one.
    mscale, of_all = rope.get("mscale"), rope.get("mscale_all_dim")
    if bool(mscale) != bool(of_all):
        raise refusal(f"{prefix}.mscale_all_dim", of_all, "set with mscale, or neither")
    return bool(mscale)


def _share(
    hf_config: HfConfig, rope: Mapping[str, Any], prefix: str, default_share: float | None
) -> float:
    share = default_share or 1.0
    for holder, where in ((hf_config, ""), (rope, f"{prefix}.")):
        partial = holder.get("partial_rotary_factor")
        if default_share is not None:
            share = number(holder, "partial_rotary_factor", share, 1e-3, 1, where)
        elif partial is not None and (isinstance(partial, bool) or partial != 1):
            raise refusal(f"{where}partial_rotary_factor", partial, "1.0")
    return share


def rope_parameters(hf_config: HfConfig) -> tuple[Mapping[str, Any], str]:
    """Returns rotary parameters and their key; ModelError if contradictory or not an object."""
    found: dict[str, Mapping[str, Any]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = hf_config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise refusal(key, value, "an object with rope_type, or null")
        if value:
            found[key] = value
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise refusal(
            "rope_scaling", found["rope_scaling"], "the same as rope_parameters, or neither"
        )
    key = "rope_scaling" if "rope_parameters" not in found and found else "rope_parameters"
    rope = found.get(key, {})
    kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise refusal(f"{key}.type", kinds[1], f"the same as rope_type = {shown(kinds[0])}")
    return rope, key
