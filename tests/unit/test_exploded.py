"""Which weights count as exploded, and what a wrong log-probability is put down to."""

from __future__ import annotations

import math

import pytest
import torch

from hybridrl.errors import UserError
from hybridrl.models.weight_bounds import exploded
from hybridrl.rollout.common.sampling import no_logprob

GOOD = {
    "norm.weight": torch.tensor([9999.0, -9999.0]),
    "number": torch.tensor([10**9]),
    "empty": torch.zeros(0),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (math.nan, "a.weight is not finite"),
        (math.inf, "a.weight is not finite"),
        (-math.inf, "a.weight is not finite"),
        (20000.0, "a.weight reaches 2.0e+04"),
        (-20000.0, "a.weight reaches 2.0e+04"),
    ],
)
def test_weights_that_are_not_finite_or_too_large_are_named(
    dtype: torch.dtype, value: float, said: str
) -> None:
    bad = torch.tensor([1.0, value, -1.0]).to(dtype)
    assert exploded({**GOOD, "a.weight": bad}) == said


def test_the_largest_weight_is_named_and_good_ones_are_not() -> None:
    assert exploded(GOOD) is None
    eight_bits = torch.tensor([400.0, -400.0]).to(torch.float8_e4m3fn)
    assert exploded({**GOOD, "quantized": eight_bits}) is None
    bad = {"a": torch.tensor([1e5]), "b": torch.tensor([-1e30]), "c": torch.tensor([1e6])}
    assert exploded({**GOOD, **bad}) == "b reaches 1.0e+30"


def test_a_wrong_log_probability_is_the_users_mistake_only_where_weights_explain_it() -> None:
    error = no_logprob("hf", math.nan, 7, 3, GOOD)
    assert type(error) is RuntimeError
    text = "the hf engine computed log-probability nan for request 7 (weights version 3)"
    assert str(error) == text
    error = no_logprob("hf", math.nan, 7, 3, {"a": torch.tensor([1e30])})
    assert isinstance(error, UserError) and error.name == "train.learning_rate"
    assert "a reaches 1.0e+30 after step 3; " + text in str(error)
    assert "Lower train.learning_rate" in error.remedy and "checkpoints" in error.remedy
