"""How evenly experts are used, from counts."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from hybridrl.models.family import ModelShape, MoeShape
from hybridrl.models.megatron.router import Router, load_metrics
from hybridrl.models.megatron.router_replay import replay_metrics

EVEN = [4.0, 4.0, 4.0, 4.0]


def test_load_is_of_the_busiest_layer_and_dense_layers_count_nowhere() -> None:
    # Tokens of four experts, two a token, and the entropy's sum over the 8 tokens.
    load = torch.tensor(
        [[*EVEN, 8 * math.log(4)], [0, 0, 0, 0, 0], [8, 8, 0, 0, 8 * math.log(2)]],
        dtype=torch.float64,
    )
    assert load_metrics(load, experts_per_token=2) == pytest.approx(
        {
            "max_load": 2.0,
            "unused_experts": 2.0,
            "routing_entropy": (math.log(4) + math.log(2)) / 2,
            "max_load/layer_0": 1.0,
            "max_load/layer_2": 2.0,
            "routing_entropy/layer_0": math.log(4),
            "routing_entropy/layer_2": math.log(2),
        }
    )


@pytest.mark.parametrize(("function", "of_zero"), [("softmax", 0.25), ("sigmoid", 0.25)])
def test_shares_of_scores_add_up_to_one(function: str, of_zero: float) -> None:
    router = SimpleNamespace(score_function=function)
    shares_TE = Router._shares(router, torch.tensor([[0.0] * 4, [0.0, 1.0, -50.0, 2.0]]))
    assert torch.allclose(shares_TE.sum(-1), torch.ones(2)) and float(shares_TE[0, 0]) == of_zero
    ratio = 1 / (1 + math.exp(-1)) / 0.5 if function == "sigmoid" else math.e
    assert float(shares_TE[1, 1] / shares_TE[1, 0]) == pytest.approx(ratio)


def test_a_layer_that_replays_nothing_lowers_the_share() -> None:
    moe = MoeShape(4, 2, 16, dense_layers=(0,))
    shape = ModelShape(3, 16, 4, 2, 4, 32, 99, False, moe=moe)
    # Positions that predict, of these replayed, experts in agreement, tokens without a record.
    told, nothing = [10, 10, 15, 2], [0, 0, 0, 0]
    whole = replay_metrics(torch.tensor([nothing, told, told], dtype=torch.float64), shape)
    assert whole == {"replayed_share": 1, "agreed_share": 0.75, "own_choice_tokens": 2}
    half = replay_metrics(torch.tensor([nothing, told, nothing], dtype=torch.float64), shape)
    assert half["replayed_share"] == 0.5
    assert replay_metrics(torch.zeros(3, 4, dtype=torch.float64), shape) == {}
