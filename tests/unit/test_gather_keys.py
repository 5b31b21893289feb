"""Keys and values that many samples of one prompt read."""

from __future__ import annotations

import torch

from hybridrl.models.attention import GatherKeys


def test_a_shared_row_gets_the_sum_of_its_readers_gradients() -> None:
    tokens = torch.zeros(3, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([0, 2, 0, 0])
    gradient = torch.tensor([[1.0, 2.0], [5.0, 6.0], [0.5, 0.25], [0.25, 4.0]]).view(4, 1, 2)
    GatherKeys.apply(tokens, index).backward(gradient.to(torch.bfloat16))
    expected = torch.tensor([[1.75, 6.25], [0.0, 0.0], [5.0, 6.0]]).view(3, 1, 2)
    assert tokens.grad is not None and torch.equal(tokens.grad.float(), expected)
