"""Which parameters form a stack of experts, and the order that gives Megatron's buffers such."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from hybridrl.models.expert_stacks import ordered_by_stack, place_in_stack, stacks_are_even
from hybridrl.models.trainable import stack_frozen
from hybridrl.parallel.layout import TrainLayout

MIXTURE = "0/decoder.layers.3.mlp.experts."
ONE_BY_ONE = [
    f"{MIXTURE}local_experts.{i}.linear_{fc}.weight" for i in range(12) for fc in ("fc1", "fc2")
]
GROUPED = [f"{MIXTURE}linear_{fc}.weight{i}" for fc in ("fc1", "fc2") for i in range(12)]


@pytest.mark.parametrize("names", [ONE_BY_ONE, GROUPED])
def test_every_stack_ascends_in_the_reverse_of_the_order(names: list[str]) -> None:
    others = ["0/decoder.layers.3.mlp.router.weight", "0/decoder.layers.3.mlp.linear_fc1.weight1"]
    given = [others[0], *names, others[1]]
    order = ordered_by_stack(given)
    assert sorted(order) == sorted(given)
    assert (order[0], order[-1]) == (others[0], others[1]), "only experts change places"
    places = [place_in_stack(name) for name in order[-2:0:-1]]
    stacks = [f"{MIXTURE}linear_{fc}" for fc in ("fc2", "fc1")]
    assert places == [(stack, i) for stack in stacks for i in range(12)]


def test_frozen_experts_move_only_if_they_are_apart() -> None:
    memory = torch.zeros(16)  # larger than the stack, like memory that ranks read from each other
    together = [nn.Parameter(memory[4 + 2 * i : 6 + 2 * i], requires_grad=False) for i in range(4)]
    apart = [nn.Parameter(torch.full((2,), float(i)), requires_grad=False) for i in range(4)]
    for experts in (together, apart):
        before = [expert.data_ptr() for expert in experts]
        stack_frozen(dict(zip(GROUPED, experts, strict=False)))
        after = [expert.data_ptr() for expert in experts]
        assert [b - a for a, b in pairwise(after)] == [8] * 3
        assert (before == after) == (experts is together)
    assert [float(expert[0]) for expert in apart] == [0, 1, 2, 3]


@pytest.mark.parametrize("ep", [1, 2])
def test_stacks_are_even_where_no_bucket_ends_in_padding(ep: int) -> None:
    """Distances as Megatron's param_and_grad_buffer.py (0.16.1) makes them, a bucket for each."""

    def is_even(size: int, ranks: int, has_buckets: bool = True, other: int = 128 * 15) -> bool:
        shapes = {**dict.fromkeys(GROUPED, (1, size)), "0/decoder.final_layernorm.weight": (other,)}
        return stacks_are_even(shapes, TrainLayout(ep * ranks, ep=ep), has_buckets)

    for size, ranks in ((128, 4), (128 * 3, 3), (128 * 5, 5), (192, 4), (128, 3), (128 * 3, 5)):
        own = ranks if ep > 1 else ep * ranks
        assert is_even(size, ranks) == (distances(size, own) == 1), (size, ranks)
        assert is_even(size, ranks, has_buckets=False)
    assert is_even(100, 1) or ep > 1, "nothing is reduced"
    # Experts that are dealt have a buffer of their own; others lie behind the norms.
    assert is_even(128, 4, other=64) == (ep > 1)


def distances(size: int, ranks: int, num: int = 12) -> int:
    """Returns how many distances there are between neighbours, with a bucket for each."""

    def pad(at: int, divisor: int) -> int:
        return -(-at // divisor) * divisor

    starts, at = [], 0
    for _ in range(num):
        starts.append(at)
        at = pad(at + size, math.lcm(ranks, 128))
    return len({b - a for a, b in pairwise(starts)} | {pad(size, 64)})
