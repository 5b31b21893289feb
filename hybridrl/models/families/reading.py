"""What families read a config.json with: sizes, numbers and truth values, or a refusal by name.

No torch.
"""

from __future__ import annotations

from math import isfinite

from hybridrl.config.files import plain, shown
from hybridrl.errors import ModelError
from hybridrl.models.family import HfConfig

# No decoder is larger. A size beyond them would be found out by memory or time that it takes.
LARGEST = {
    "num_hidden_layers": 1 << 12,
    "original_max_position_embeddings": 1 << 40,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 40,
    "moe_intermediate_size": 1 << 22,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "decoder_sparse_step": 1 << 12,
    "first_k_dense_replace": 1 << 12,
    "kv_lora_rank": 1 << 20,
    "n_group": 1 << 14,
    "n_routed_experts": 1 << 14,
    "n_shared_experts": 1 << 14,
    "q_lora_rank": 1 << 20,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "topk_group": 1 << 14,
    "v_head_dim": 1 << 14,
}


def size(hf_config: HfConfig, key: str, default: int | None = None, prefix: str = "") -> int:
    """Returns the positive integer at `key`; `default` where the key is absent or null."""
    value = hf_config.get(key)
    if value is None:
        value = default
    largest = LARGEST.get(key, 1 << 40)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise not_a(f"{prefix}{key}", value, f"a positive integer up to {largest}")
    return value


def number(
    holder: HfConfig, key: str, default: float, least: float, most: float, prefix: str = ""
) -> float:
    """Returns the number at `key`, between `least` and `most`; `default` where it is absent or
    null.
    """
    value = holder.get(key)
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or not least <= value <= most:
        raise not_a(f"{prefix}{key}", value, f"a number from {least:g} to {most:g}")
    return float(value)


def flag(hf_config: HfConfig, key: str) -> bool:
    """Returns the truth value at `key`; False where it is absent or null."""
    value = hf_config.get(key)
    if value is not None and not isinstance(value, bool):
        raise not_a(key, value, "true or false")
    return bool(value)


def not_a(key: str, value: object, allowed: str) -> ModelError:
    """Returns the error for a value that no model has."""
    found = "nothing" if value is None else shown(value)
    return ModelError(f"config.json: {key}", found, allowed, "Mend the model's config.json.")


def require(hf_config: HfConfig, key: str, default: object, allowed: tuple[object, ...]) -> None:
    """Raises ModelError unless the value at `key`, where it is absent or null `default`, is one of
    `allowed`, of the same type.
    """
    value = hf_config.get(key)
    value = default if value is None else value
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise refusal(key, value, " or ".join(str(one) for one in allowed))


def refusal(key: str, value: object, allowed: str) -> ModelError:
    """Returns the error for a config that asks for what this family does not offer."""
    remedy = "Not supported by this family; choose another model or write a family."
    return ModelError(f"config.json: {key}", plain(value), allowed, remedy)
