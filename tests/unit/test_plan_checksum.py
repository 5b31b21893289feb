"""The checksum by which rollout.verify compares both ends of a copy."""

from __future__ import annotations

import pytest
import torch

from hybridrl.hybrid_engine.verify import checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_a_checksum_changes_with_a_bit_and_with_the_order(dtype: torch.dtype) -> None:
    part = torch.linspace(-2, 2, 12).view(3, 4).to(dtype)
    own = int(checksum(part))
    assert int(checksum(part.clone())) == own
    # Not one byte after the other: what a tensor holds counts, not where it lies.
    assert int(checksum(part.t().contiguous().t())) == own
    swapped = part.view(torch.uint8).view(3, 4, -1)[[1, 0, 2]].clone().view(dtype).view(3, 4)
    assert int(checksum(swapped)) != own
    bits = part.clone().view(torch.uint8)
    bits.view(-1)[5] ^= 1
    assert int(checksum(bits.view(dtype))) != own
