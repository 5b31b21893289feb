"""Computes frequencies for rotary positions and sets them in a Megatron model.

Megatron itself (0.16.1, RotaryEmbedding) supports only `linear` and `llama3` with fixed parameters;
this module computes all kinds. It performs the same operations in the same order as transformers
(modeling_rope_utils.py), so results are bitwise identical.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from hybridrl.errors import ModelError
from hybridrl.models.family import Rotary


def rotary_frequencies(rotary: Rotary, size: int) -> torch.Tensor:
    """Returns radians per position for each pair of `size` dims, (size / 2,) fp32, on the CPU."""
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

    Wavelengths above (original length / `low`) are multiplied by the factor, wavelengths below
    (original length / `high`) are unchanged, and those in between are interpolated.
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

    Frequencies with more than `high` rotations over the original length are unchanged, those with
    fewer than `low` rotations are divided by the factor, and those in between are interpolated.
    """
    size = 2 * len(powers)

    def dimension(turns: float) -> float:
        """Returns the dimension whose pair rotates `turns` times over the original length."""
        length = rotary.original_length / (turns * 2 * math.pi)
        return size * math.log(length) / (2 * math.log(rotary.base))

    low, high = dimension(rotary.high), dimension(rotary.low)
    if rotary.has_whole_bounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high = high + 0.001 if high == low else high
    slow = ((torch.arange(size // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    fast = 1 - slow
    scaled = 1.0 / (rotary.factor * powers)
    return scaled * (1 - fast) + 1.0 / powers * fast


def set_rotary(model: Any, rotary: Rotary) -> None:
    """Sets a GPTModel's rotary frequencies, including local frequencies for windowed layers.

    If attention rotates only part of each head, this also sets the magnitude of sines and cosines.
    If it rotates whole heads, the softmax scale already includes the magnitude.
    """
    embedding = model.rotary_pos_emb
    size, device = 2 * embedding.inv_freq.numel(), embedding.inv_freq.device
    frequencies = rotary_frequencies(rotary, size)
    if rotary.sections:
        model.rotary_pos_emb = AnglesOfThree(frequencies.to(device), axes_of(rotary))
        return
    if rotary.local is not None:
        frequencies = torch.cat((frequencies, rotary_frequencies(rotary.local, size)))
        _choose_angles(model)
    embedding.inv_freq = frequencies.to(device)
    for part in model.modules():
        if hasattr(part, "rotary_magnitude"):
            part.rotary_magnitude = rotary.magnitude
        elif rotary.share < 1 and hasattr(part, "core_attention"):
            _scale_rotated(part, rotary.magnitude)


def axes_of(rotary: Rotary) -> torch.Tensor:
    """Returns the axis of each frequency, (F,): 0 for time, 1 for height, 2 for width.

    If they alternate, frequency i belongs to height if i % 3 is 1, and to width if i % 3 is 2, up
    to three times the size of their sections; all others belong to time (transformers,
    modeling_qwen3_vl.py). Otherwise, sections are contiguous (modeling_qwen2_5_vl.py).
    """
    sizes = torch.tensor(rotary.sections)
    if not rotary.has_alternating_sections:
        return torch.arange(3).repeat_interleave(sizes)
    axis_F = torch.zeros(int(sizes.sum()), dtype=torch.int64)
    for axis in (1, 2):
        axis_F[axis : 3 * rotary.sections[axis] : 3] = axis
    return axis_F


class AnglesOfThree(torch.nn.Module):
    """Angles of tokens with three positions: time, height and width.

    Megatron's own class (0.16.1, MultimodalRotaryEmbedding) has contiguous sections only.

    Args:
        frequencies: Radians per position, (F,) fp32.
        axis_F: Axis of each frequency.
    """

    def __init__(self, frequencies: torch.Tensor, axis_F: torch.Tensor) -> None:
        super().__init__()
        self.inv_freq = frequencies
        self._axis_F = axis_F.to(frequencies.device)

    def forward(self, position_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        position_SBF = position_ids.permute(2, 1, 0).float()[..., self._axis_F]
        angles_SBF = position_SBF * self.inv_freq
        return torch.cat((angles_SBF, angles_SBF), -1)[:, :, None]


def _scale_rotated(attention: Any, magnitude: float) -> None:
    """Makes Megatron's attention multiply the rotated part of queries and keys by `magnitude`.

    Megatron computes this factor as 0.1 * mscale * log(factor) + 1, from TransformerConfig
    attributes that are meant for YaRN (_yarn_get_concentration_factor_from_config). Version 0.16
    computes it in every pass, version 0.19 once, when it builds the layer.
    """
    config = attention.config
    config.yarn_rotary_scaling_factor = math.e
    config.yarn_mscale, config.yarn_mscale_all_dim = 10 * (magnitude - 1), 0.0
    if hasattr(attention, "_yarn_concentration_factor"):
        attention._yarn_concentration_factor = magnitude


def angles_of_layer(both: torch.Tensor, is_local: bool) -> torch.Tensor:
    """Returns the local or the global angles, (..., size), from Megatron's (..., 2 size).

    Megatron repeats all frequencies, which here are the global frequencies followed by the local
    ones.
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
                "different angles for windowed layers",
                f"none with {type(part).__name__}, which supports only one kind of angles",
                "Use hybridrl's NormedAttention in the family's layers.",
            )
