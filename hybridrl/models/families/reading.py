"""Reads sizes, numbers and booleans from a config.json; errors name the key. No torch."""

from __future__ import annotations

from math import isfinite

from hybridrl.config.files import plain, shown
from hybridrl.errors import MISSING, ModelError
from hybridrl.models.family import HfConfig

# No decoder is larger. A larger value would exhaust memory or time before any error is reported.
LARGEST_SIZE = 1 << 24
LARGEST = {
    "max_position_embeddings": 1 << 40,
    "n_routed_experts": 1 << 14,
    "num_attention_heads": 1 << 14,
    "num_experts": 1 << 14,
    "num_hidden_layers": 1 << 12,
    "num_local_experts": 1 << 14,
    "original_max_position_embeddings": 1 << 40,
    "sliding_window": 1 << 40,
}


def size(hf_config: HfConfig, key: str, default: int | None = None, prefix: str = "") -> int:
    """Returns the positive integer at `key`; `default` if the key is absent or null."""
    value = hf_config.get(key)
    if value is None:
        value = default
    largest = LARGEST.get(key, LARGEST_SIZE)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise not_a(f"{prefix}{key}", value, f"a positive integer up to {largest}")
    return value


def number(
    holder: HfConfig, key: str, default: float, least: float, most: float, prefix: str = ""
) -> float:
    """Returns the number from `least` to `most` at `key`; `default` if it is absent or null."""
    value = holder.get(key)
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or not least <= value <= most:
        raise not_a(f"{prefix}{key}", value, f"a number from {least:g} to {most:g}")
    return float(value)


def flag(hf_config: HfConfig, key: str) -> bool:
    """Returns the boolean at `key`; False if the key is absent or null."""
    value = hf_config.get(key)
    if value is not None and not isinstance(value, bool):
        raise not_a(key, value, "true or false")
    return bool(value)


def not_a(key: str, value: object, allowed: str) -> ModelError:
    """Returns the error for a value that is wrong for any model."""
    found = MISSING if value is None else shown(value)
    return ModelError(f"config.json: {key}", found, allowed, "Fix the model's config.json.")


def require(hf_config: HfConfig, key: str, default: object, allowed: tuple[object, ...]) -> None:
    """Raises ModelError unless the value (or `default`) equals, with its type, one of `allowed`."""
    value = hf_config.get(key)
    value = default if value is None else value
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise refusal(key, value, " or ".join(str(one) for one in allowed))


def refusal(key: str, value: object, allowed: str) -> ModelError:
    """Returns the error for a value that this family does not support."""
    remedy = "This family does not support it. Choose another model, or write a family."
    found = value if value is MISSING else plain(value)
    return ModelError(f"config.json: {key}", found, allowed, remedy)
