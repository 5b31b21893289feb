"""Logits in float32: never rounded, and on CPU without a float32 copy of the output layer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hybridrl import ops
from hybridrl.debug.residual import trainer_logits
from hybridrl.models.megatron.heads import LanguageModel
from hybridrl.rollout.hf.exact import compute_wide_logits
from hybridrl.rollout.vllm.repairs import _wide_product

V, D = 2500, 16


class Largest(TorchDispatchMode):
    """Notes the size of the largest float32 tensor with a row per column of the output layer."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
            self.size = max(self.size, found.numel())
        return found


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(3, D), 5 * torch.randn(V, D)
    return hidden.bfloat16(), weight.bfloat16()


def check(logits: torch.Tensor, hidden: torch.Tensor, weight: torch.Tensor) -> None:
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits.double(), hidden.double() @ weight.double().T, atol=1e-4, rtol=1e-5
    )
    assert not torch.equal(logits, logits.bfloat16().float())


@pytest.mark.parametrize("side", ["ops", "hf", "vllm"])
def test_logits_are_wide_without_a_copy_of_the_head(
    inputs: tuple[torch.Tensor, torch.Tensor], side: str
) -> None:
    hidden, weight = inputs
    head = torch.nn.Linear(D, V, bias=False, dtype=torch.bfloat16)
    head.weight.data = weight
    compute_wide_logits(SimpleNamespace(lm_head=head))
    with torch.no_grad(), Largest() as largest:
        if side == "ops":
            logits = ops.wide_logits(hidden, weight)
        elif side == "hf":
            logits = head(hidden[None])[0]
        else:
            logits = _wide_product(head, hidden, None)
    check(logits, hidden, weight)
    assert largest.size < V * D


def test_weights_in_float32_are_not_copied() -> None:
    hidden, weight = torch.randn(3, D), torch.randn(V, D)
    with Largest() as largest:
        logits = ops.wide_logits(hidden, weight)
    assert torch.equal(logits, hidden @ weight.T)
    assert largest.size <= V * D  # a view of the weights


class Head(LanguageModel):
    """An output layer alone."""

    def __init__(self, weight: torch.Tensor) -> None:
        torch.nn.Module.__init__(self)
        self.exact_logps, self._weight = None, weight

    def output_weight(self) -> torch.Tensor:
        return self._weight


def test_the_layer_by_layer_comparison_does_not_round_logits(
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> None:
    hidden, weight = inputs
    place = SimpleNamespace(dp=0, cp=0, tp=0)
    model = SimpleNamespace(
        world=SimpleNamespace(sum_over_world=lambda logits: logits),
        source=SimpleNamespace(shape=SimpleNamespace(vocab_size=V)),
        chunks=[Head(weight)],
        mesh=SimpleNamespace(where=place, is_last_stage=True),
    )
    check(trainer_logits(cast(Any, model), hidden.float()), hidden, weight)
