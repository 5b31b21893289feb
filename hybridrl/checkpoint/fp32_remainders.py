"""Stores an fp32 master weight as a bf16 weight and a 16-bit remainder, without loss.

The bf16 weight is the master rounded to nearest, with ties away from zero. The remainder is the
difference of the two bit patterns, as in transformer-engine's FusedAdam (`store_param_remainders`).
"""

from __future__ import annotations

import torch
from torch import Tensor

HALF = 1 << 15  # half of the last bit that bf16 keeps


def join_(bits: Tensor, weight: Tensor, remainder: Tensor) -> Tensor:
    """Restores fp32 masters of bf16 weights and int16 remainders, as a view of `bits` (int32)."""
    bits.copy_(weight.view(torch.int16)).bitwise_left_shift_(16).add_(remainder)
    return bits.view(torch.float32)


def split_(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Stores finite fp32 masters, which are overwritten, as bf16 weights and int16 remainders."""
    bits = master.view(torch.int32)
    # The conversion to 16 bits keeps the low half of an integer: the remainder. Adding half of the
    # last kept bit carries into the high half if the remainder is negative.
    remainder.copy_(bits)
    weight.view(torch.int16).copy_(bits.add_(HALF).bitwise_right_shift_(16))


def remainder_of(master: Tensor, weight: Tensor) -> Tensor:
    """Returns the remainders, int16, of fp32 masters whose bf16 weights are already rounded. A
    master between two bf16 numbers that was rounded down loses its last bit, because its remainder
    does not fit.
    """
    rounded = weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    return (master.view(torch.int32) - rounded).clamp_(-HALF, HALF - 1).to(torch.int16)


def joined(weight: Tensor, remainder: Tensor) -> Tensor:
    """Returns new fp32 masters; see `join_`."""
    return join_(torch.empty_like(remainder, dtype=torch.int32), weight, remainder)
