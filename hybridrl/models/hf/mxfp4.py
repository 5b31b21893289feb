"""Dequantizes MXFP4 tensors, in which GPT-OSS is published.

A tensor NAME of the model is stored as NAME_blocks, (..., blocks, 16) uint8, and NAME_scales, (...,
blocks) uint8. A byte contains two FP4 (E2M1) numbers, the lower four bits first; the 32 numbers of
a block share the scale 2^(scale - 127) (Open Compute Project 2023, "OCP Microscaling Formats (MX)
Specification", version 1.0, sections 5.2 and 5.3). The stored matrices of an expert are
transposed with respect to those of the files in 16 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

# The values of FP4 (E2M1) by their four bits.
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
EXPONENT_BIAS = 127


def dequantized(blocks: Tensor, scales: Tensor) -> Tensor:
    """Returns the numbers of MXFP4 blocks in bfloat16, (..., 32 * blocks).

    All numbers are exact, unless they are outside of bfloat16's range.
    """
    values = torch.tensor(VALUES, device=blocks.device)
    pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), -1)
    exponents = scales.int() - EXPONENT_BIAS
    scaled = torch.ldexp(pairs.flatten(-2), exponents[..., None])
    return scaled.flatten(-2).to(torch.bfloat16)
