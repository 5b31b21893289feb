"""Keys and values that many samples of one prompt read."""

from __future__ import annotations

import torch

from hybridrl.models.attention import GatherKeys


def test_gradients_of_a_shared_row_are_summed_in_fp32() -> None:
    tokens = torch.zeros(2, 1, 1, dtype=torch.bfloat16, requires_grad=True)
    index = torch.zeros(4097, dtype=torch.int64)
    gradient = torch.full((4097, 1, 1), 2.0**-12, dtype=torch.bfloat16)
    gradient[0] = 1.0
    GatherKeys.apply(tokens, index).backward(gradient)
    # In bfloat16 1 + 2^-12 is 1, so that a sum in it would stay 1.
    assert tokens.grad is not None and tokens.grad.flatten().tolist() == [2.0, 0.0]
