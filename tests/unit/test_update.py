"""Whether a step may be taken: its losses and its gradients' norm must be finite, each of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hybridrl.training.update import Gradients, LossPart


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
