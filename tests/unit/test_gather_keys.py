"""Keys and values that many samples of one prompt read."""

from __future__ import annotations

import pytest
import torch

from hybridrl.models.megatron.attention import GatherKeys, Readers


def test_a_shared_row_gets_the_sum_of_its_readers_gradients() -> None:
    tokens = torch.zeros(3, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([0, 2, 0, 0])
    gradient = torch.tensor([[1.0, 2.0], [5.0, 6.0], [0.5, 0.25], [0.25, 4.0]]).view(4, 1, 2)
    GatherKeys.apply(tokens, index).backward(gradient.to(torch.bfloat16))
    expected = torch.tensor([[1.75, 6.25], [0.0, 0.0], [5.0, 6.0]]).view(3, 1, 2)
    assert tokens.grad is not None and torch.equal(tokens.grad.float(), expected)


@pytest.mark.parametrize("is_given", [False, True])
def test_gradients_of_many_readers_are_summed_in_their_order_and_in_fp32(is_given: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(0, 40, (3000,), generator=generator)
    gradient = torch.randn(3000, 2, 3, generator=generator).to(torch.bfloat16)
    expected = torch.zeros(41, 2, 3)
    for row, token in enumerate(index.tolist()):
        expected[token] += gradient[row].float()
    readers = Readers.of(index, 41) if is_given else None
    for dtype, tolerance in ((torch.float32, 0.0), (torch.bfloat16, 2**-7)):  # one rounding
        tokens = torch.zeros(41, 2, 3, dtype=dtype, requires_grad=True)
        GatherKeys.apply(tokens, index, readers).backward(gradient.to(dtype))
        torch.testing.assert_close(tokens.grad, expected.to(dtype), rtol=tolerance, atol=0)
