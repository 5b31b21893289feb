"""What becomes of a micro-batch without a token for the experts of a rank."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from hybridrl.models.dispatch import GatheringDispatcher


def test_experts_without_tokens_add_zeros_without_fused_kernels() -> None:
    """Whose own for no rows neither have the shape nor a backward pass; here they would raise."""
    dispatcher = GatheringDispatcher.__new__(GatheringDispatcher)
    dispatcher.config = SimpleNamespace(moe_permute_fusion=True)
    dispatcher.local_map = torch.zeros(5, 2, dtype=torch.bool)
    dispatcher._tokens_E, dispatcher._counted = torch.zeros(2, dtype=torch.int64), None
    hidden_TD = torch.randn(5, 3, requires_grad=True)
    weights_TE = torch.rand(5, 2, requires_grad=True)
    tokens, tokens_E, weights = dispatcher.dispatch_postprocess(hidden_TD, weights_TE)
    assert tokens.shape == (0, 3) and weights.shape == (0,) and int(tokens_E.sum()) == 0
    added_TD = dispatcher.combine_preprocess(tokens * weights[:, None])
    assert added_TD.shape == (5, 3) and not added_TD.any()
    added_TD.sum().backward()  # reaches what was gathered, so that every rank reduces gradients
    assert hidden_TD.grad is not None and hidden_TD.grad.shape == (5, 3)
    assert weights_TE.grad is not None and not weights_TE.grad.any()
