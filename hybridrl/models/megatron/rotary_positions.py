"""The frequencies of rotary positions, set in a Megatron model.

Megatron's own scalings (0.16.1, RotaryEmbedding) are `llama3` with fixed parameters and `linear`;
here all kinds are one function. The operations and their order are those of transformers
(modeling_rope_utils.py), so that no bit differs.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hybridrl.errors import ModelError
from hybridrl.models.family import Rotary


def rotary_frequencies(rotary: Rotary, size: int) -> torch.Tensor:
    """Returns the angle a position of each pair of `size` dimensions, (size / 2,) fp32, CPU."""
    powers = rotary.base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    plain = 1.0 / powers
    if rotary.kind == "linear":
        return plain / rotary.factor
    if rotary.kind == "llama3":
        return _llama3(rotary, plain)
    if rotary.kind == "yarn":
        return _yarn(rotary, powers)
    if rotary.kind == "longrope":
        return 1.0 / (torch.tensor(rotary.divisors, dtype=torch.float32) * powers)
    return plain


def _llama3(rotary: Rotary, plain: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: waves longer than the original length / `low` are stretched by the factor, those
    shorter than it / `high` are kept, and between the two it is blended.
    """
    wave = 2 * math.pi / plain
    longest, shortest = (rotary.original_length / bound for bound in (rotary.low, rotary.high))
    stretched = torch.where(wave > longest, plain / rotary.factor, plain)
    kept = (rotary.original_length / wave - rotary.low) / (rotary.high - rotary.low)
    blended = (1 - kept) * stretched / rotary.factor + kept * stretched
    is_between = ~(wave < shortest) & ~(wave > longest)
    return torch.where(is_between, blended, stretched)


def _yarn(rotary: Rotary, powers: torch.Tensor) -> torch.Tensor:
    """Peng et al. 2023, "YaRN", section 3.2: pairs that turn more than `high` times over the
    original length keep their frequency, those that turn less than `low` times are divided by the
    factor, and between the two it is blended.
    """
    size = 2 * len(powers)

    def dimension(turns: float) -> float:
        """Returns the dimension that turns so often over the original length."""
        length = rotary.original_length / (turns * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(rotary.base))

    low = max(math.floor(dimension(rotary.high)), 0)
    high: float = min(math.ceil(dimension(rotary.low)), size - 1)
    high = high + 0.001 if high == low else high
    slow = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    fast = 1 - slow
    scaled = 1.0 / (rotary.factor * powers)
    return scaled * (1 - fast) + 1.0 / powers * fast


def set_rotary(model: Any, rotary: Rotary) -> None:
    """Gives a GPTModel its frequencies, those of windowed layers too where they are others, and
    attention that turns a part of each head the magnitude of sines and cosines; attention that
    turns whole heads has it in its softmax's scale.
    """
    embedding = model.rotary_pos_emb
    size, device = 2 * embedding.inv_freq.numel(), embedding.inv_freq.device
    frequencies = rotary_frequencies(rotary, size)
    if rotary.local is not None:
        frequencies = torch.cat((frequencies, rotary_frequencies(rotary.local, size)))
        _give_layers_their_kind(model)
    embedding.inv_freq = frequencies.to(device)
    for part in model.modules():
        if hasattr(part, "rotary_magnitude"):
            part.rotary_magnitude = rotary.magnitude
        elif rotary.share < 1 and hasattr(part, "core_attention"):
            _multiply_turned(part, rotary.magnitude)


def _multiply_turned(attention: Any, magnitude: float) -> None:
    """Lets Megatron's attention multiply the part of queries and keys that turns.

    It makes that number of attributes that a TransformerConfig has for YaRN alone
    (_yarn_get_concentration_factor_from_config): 0.1 * mscale * log(factor) + 1. 0.16 does so in
    each pass, 0.19 when the layer is built, and keeps it.
    """
    config = attention.config
    config.yarn_rotary_scaling_factor = math.e
    config.yarn_mscale, config.yarn_mscale_all_dim = 10 * (magnitude - 1), 0.0
    if hasattr(attention, "_yarn_concentration_factor"):
        attention._yarn_concentration_factor = magnitude


def angles_of_layer(both: torch.Tensor, is_local: bool) -> torch.Tensor:
    """Returns (..., size) of the angles (..., 2 size) that Megatron makes of two kinds of
    frequencies after one another, which it writes twice.
    """
    kinds = both.unflatten(-1, (2, 2, -1))
    return kinds[..., int(is_local), :].flatten(-2)


def _give_layers_their_kind(model: Any) -> None:
    for part in model.modules():
        if hasattr(part, "turn_by_window"):
            part.turn_by_window()
        elif hasattr(part, "core_attention"):
            raise ModelError(
                "rotary.local of the family's model_keywords",
                "other angles of windowed layers",
                f"none with {type(part).__name__}, whose layers all turn alike",
                "Give the family's layers hybridrl's NormedAttention.",
            )
