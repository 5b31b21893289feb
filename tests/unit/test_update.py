"""Steps need finite losses and gradient norms; a loss outlives the memory that Megatron had."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from hybridrl.algorithms.base import LossOutput
from hybridrl.training.update import Gradients, LossPart, detached


@pytest.mark.parametrize(
    ("grad_norm", "losses", "is_finite"),
    [
        (1.0, (0.5, -2.0), True),
        (math.inf, (0.5, -2.0), False),
        (math.nan, (0.5, -2.0), False),
        (1.0, (math.nan, -2.0), False),
        (1.0, (0.5, math.inf), False),
    ],
)
def test_one_number_that_is_not_finite_is_enough(
    grad_norm: float, losses: tuple[float, ...], is_finite: bool
) -> None:
    parts = [LossPart(f"part{i}", (), (), {f"part{i}/loss": x}) for i, x in enumerate(losses)]
    model: Any = None
    found = Gradients("policy", model, parts, {"policy/grad_norm": grad_norm}, 1e-3)
    assert found.is_finite == is_finite


def test_a_loss_is_what_it_was_when_megatron_uses_its_memory_for_something_else() -> None:
    weight = torch.tensor(2.0, requires_grad=True)
    loss = weight * 3
    kept = detached(LossOutput(loss, {}))
    loss.data.fill_(float("nan"))
    assert kept.loss == 6 and not kept.loss.requires_grad
