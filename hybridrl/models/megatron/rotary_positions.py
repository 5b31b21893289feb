"""Frequencies of rotary positions, set in a Megatron model.

Megatron's own scalings (0.16.1, RotaryEmbedding) are `llama3` with fixed parameters and `linear`;
one function here computes all kinds. Operations and their order are those of transformers
(modeling_rope_utils.py), so results are bit-equal.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hybridrl.errors import ModelError
from hybridrl.models.family import Rotary


def rotary_frequencies(rotary: Rotary, size: int) -> torch.Tensor:
    """Returns radians per position for each pair of `size` dimensions, (size / 2,) fp32, on the
    CPU.
    """
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
    """Returns frequencies scaled as in Llama 3.1.

    Waves longer than the original length / `low` are stretched by the factor, waves shorter than
    the original length / `high` are kept, and waves between the two are blended.
    """
    wave = 2 * math.pi / plain
    longest, shortest = (rotary.original_length / bound for bound in (rotary.low, rotary.high))
    stretched = torch.where(wave > longest, plain / rotary.factor, plain)
    kept = (rotary.original_length / wave - rotary.low) / (rotary.high - rotary.low)
    blended = (1 - kept) * stretched / rotary.factor + kept * stretched
    is_between = ~(wave < shortest) & ~(wave > longest)
    return torch.where(is_between, blended, stretched)


def _yarn(rotary: Rotary, powers: torch.Tensor) -> torch.Tensor:
    """Returns frequencies scaled as in Peng et al. 2023, "YaRN", section 3.2.

    Pairs that turn more than `high` times over the original length keep their frequency, pairs that
    turn less than `low` times are divided by the factor, and pairs between the two are blended.
    """
    size = 2 * len(powers)

    def dimension(turns: float) -> float:
        """Returns the dimension that makes `turns` turns over the original length."""
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
    """Sets the rotary frequencies of a GPTModel, and the local ones of windowed layers if they
    differ.

    Attention that rotates a part of each head also gets the magnitude of sines and cosines here.
    Attention that rotates whole heads has it in its softmax scale.
    """
    embedding = model.rotary_pos_emb
    size, device = 2 * embedding.inv_freq.numel(), embedding.inv_freq.device
    frequencies = rotary_frequencies(rotary, size)
    if rotary.local is not None:
        frequencies = torch.cat((frequencies, rotary_frequencies(rotary.local, size)))
        _choose_angles(model)
    embedding.inv_freq = frequencies.to(device)
    for part in model.modules():
        if hasattr(part, "rotary_magnitude"):
            part.rotary_magnitude = rotary.magnitude
        elif rotary.share < 1 and hasattr(part, "core_attention"):
            _scale_rotated(part, rotary.magnitude)


def _scale_rotated(attention: Any, magnitude: float) -> None:
    """Makes Megatron's attention multiply the rotated part of queries and keys by `magnitude`.

    Megatron computes that factor from TransformerConfig attributes that only YaRN has
    (_yarn_get_concentration_factor_from_config): 0.1 * mscale * log(factor) + 1. Version 0.16 does
    so in every pass, 0.19 once, when it builds the layer.
    """
    config = attention.config
    config.yarn_rotary_scaling_factor = math.e
    config.yarn_mscale, config.yarn_mscale_all_dim = 10 * (magnitude - 1), 0.0
    if hasattr(attention, "_yarn_concentration_factor"):
        attention._yarn_concentration_factor = magnitude


def angles_of_layer(both: torch.Tensor, is_local: bool) -> torch.Tensor:
    """Returns the local or the global angles, (..., size), from Megatron's (..., 2 size).

    Megatron concatenates the frequencies, here global then local, with themselves.
    """
    kinds = both.unflatten(-1, (2, 2, -1))
    return kinds[..., int(is_local), :].flatten(-2)


def _choose_angles(model: Any) -> None:
    for part in model.modules():
        if hasattr(part, "choose_angles"):
            part.choose_angles()
        elif hasattr(part, "core_attention"):
            raise ModelError(
                "rotary.local of the family's model_keywords",
                "other angles for windowed layers",
                f"none with {type(part).__name__}, which has one kind of angles",
                "Give the family's layers hybridrl's NormedAttention.",
            )
