"""What becomes of a micro-batch without a token for the experts of a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP

from hybridrl.models.megatron.dispatch import GatheringDispatcher
from hybridrl.models.megatron.layers import GroupedExperts


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


def test_grouped_experts_never_multiply_without_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ends the process on GPUs; what the row adds goes nowhere."""
    weight_DD = torch.randn(3, 3, requires_grad=True)

    def multiply(_: Any, tokens: torch.Tensor, counts_E: torch.Tensor, probs: torch.Tensor) -> Any:
        assert len(tokens) == len(probs) == int(counts_E.sum()) > 0
        return probs[:, None] * (tokens @ weight_DD), None

    monkeypatch.setattr(TEGroupedMLP, "forward", multiply)
    experts = GroupedExperts.__new__(GroupedExperts)
    torch.nn.Module.__init__(experts)
    hidden_TD, probs_T = torch.randn(4, 3, requires_grad=True), torch.rand(4, requires_grad=True)
    none_E = torch.zeros(2, dtype=torch.int64)
    output, _ = experts(hidden_TD[:0], none_E, probs_T[:0])
    assert output.shape == (0, 3) and not none_E.any()
    output.sum().backward()  # reaches the weights too, whose gradients ranks reduce together
    for one in (weight_DD, hidden_TD, probs_T):
        assert one.grad is not None and not one.grad.any()
    some_E = torch.tensor([1, 3])
    output, _ = experts(hidden_TD, some_E, probs_T)
    assert torch.equal(output, probs_T[:, None] * (hidden_TD @ weight_DD))
