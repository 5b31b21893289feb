"""Which parameters form a stack of experts, and the order that gives Megatron's buffers such."""

from __future__ import annotations

import pytest

from hybridrl.models.expert_stacks import in_stacks, is_run, place_in_stack

MIXTURE = "0/decoder.layers.3.mlp.experts."
ONE_BY_ONE = [
    f"{MIXTURE}local_experts.{i}.linear_{fc}.weight" for i in range(12) for fc in ("fc1", "fc2")
]
GROUPED = [f"{MIXTURE}linear_{fc}.weight{i}" for fc in ("fc1", "fc2") for i in range(12)]


@pytest.mark.parametrize("names", [ONE_BY_ONE, GROUPED])
def test_every_stack_ascends_in_the_reverse_of_the_order(names: list[str]) -> None:
    others = ["0/decoder.layers.3.mlp.router.weight", "0/decoder.layers.3.mlp.linear_fc1.weight1"]
    given = [others[0], *names, others[1]]
    order = in_stacks(given)
    assert sorted(order) == sorted(given)
    assert (order[0], order[-1]) == (others[0], others[1]), "only experts change places"
    places = [place_in_stack(name) for name in order[-2:0:-1]]
    stacks = [f"{MIXTURE}linear_{fc}" for fc in ("fc2", "fc1")]
    assert places == [(stack, i) for stack in stacks for i in range(12)]


def test_a_run_is_of_one_stack_and_without_gaps() -> None:
    assert is_run(GROUPED[2:6]) and is_run(ONE_BY_ONE[4:8:2]) and is_run(GROUPED[:1])
    assert not is_run(GROUPED[2:6:2]) and not is_run(GROUPED[10:14]) and not is_run(["a", "b"])
