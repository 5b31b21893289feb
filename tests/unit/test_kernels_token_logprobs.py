"""The reference of the log-probability head, against fp64."""

from __future__ import annotations

import pytest
import torch

from hybridrl import ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_entropy", [True, False])
def test_reference_sums_in_fp32_and_adds_to_the_main_gradient(
    dtype: torch.dtype, has_entropy: bool
) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    hidden, weight = draw(1500, 16).to(dtype), draw(70, 16).to(dtype)
    target = torch.randint(0, 70, (1500,), generator=generator)
    grad_logp, grad_entropy = draw(1500), draw(1500) * has_entropy
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    log_p = (exact[0] @ exact[1].T / 0.7).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    logp = log_p.gather(1, target[:, None])[:, 0]
    ((logp * grad_logp).sum() + (entropy * grad_entropy).sum()).backward()

    stats = ops.vocab_stats(hidden, weight, target, 0.7)
    log_sum = stats.sum_T.log()
    assert torch.allclose((stats.target_T - stats.max_T - log_sum).double(), logp, atol=1e-5)
    found = log_sum - stats.weighted_T / stats.sum_T
    assert torch.allclose(found.double(), entropy, atol=1e-5)
    arguments = hidden, weight, target, 0.7, stats.max_T, log_sum, found, grad_logp
    arguments += (grad_entropy if has_entropy else None,)
    returned = ops.vocab_backward(*arguments, None)
    main_grad = torch.ones(70, 16)
    _, added = ops.vocab_backward(*arguments, main_grad)
    assert added is main_grad
    for tensor, wanted in zip(returned, exact, strict=True):
        assert tensor.dtype == dtype
        # One rounding to the type of the result.
        bound = 2**-8 if dtype == torch.bfloat16 else 1e-5
        assert torch.allclose(tensor.double(), wanted.grad, rtol=bound, atol=1e-4)
    # Not rounded: sums of 1500 terms in fp32.
    assert torch.allclose(main_grad.double() - 1, exact[1].grad, rtol=1e-5, atol=2e-4)
