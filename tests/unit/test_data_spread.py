"""Groups over replicas: bounds of the division, and what responses are expected to be like."""

from __future__ import annotations

import json
import random

import pytest
from some_cases import some

from hybridrl.contracts.prompts import Prompt
from hybridrl.generation.spread import PROMPT_TOKEN_WORK, ResponseLengths, group_work, spread


def prompt(number: int, length: int = 3) -> Prompt:
    return Prompt(number, "", (number,) * length)


@pytest.mark.parametrize("seed", some(range(200), 40))
def test_spread_gives_every_group_once_and_loads_that_differ_by_one_group_at_most(
    seed: int,
) -> None:
    rng = random.Random(seed)
    num_replicas = rng.randint(1, 9)
    work = [rng.choice([0.0, 1.0, rng.paretovariate(1.1)]) for _ in range(rng.randint(0, 40))]
    found = spread(work, num_replicas)
    assert sorted(group for groups in found for group in groups) == list(range(len(work)))
    loads = [sum(work[group] for group in groups) for groups in found]
    # Not only the largest group of all: of two replicas, one that the more loaded one has.
    for groups, load in zip(found, loads, strict=True):
        smallest = min((work[group] for group in groups), default=0.0)
        assert load - min(loads) <= smallest * (1 + 1e-12)
        assert [work[group] for group in groups] == sorted(
            (work[group] for group in groups), reverse=True
        )
    best = max(sum(work) / num_replicas, max(work, default=0.0))
    assert max(loads) <= best * 4 / 3 + max(work, default=0.0) / 3 + 1e-9


def test_spread_separates_the_long_groups_that_taking_turns_puts_together() -> None:
    work = [100.0, 1.0, 100.0, 1.0, 100.0, 1.0, 100.0, 1.0]
    assert [sum(work[i] for i in groups) for groups in spread(work, 2)] == [202.0, 202.0]
    assert spread([5.0] * 6, 3) == [[0, 3], [1, 4], [2, 5]]  # nothing known: in turns


def test_expected_length_is_the_prompts_own_then_the_mean_then_what_was_given() -> None:
    lengths = ResponseLengths()
    assert lengths.expected([prompt(1), prompt(2)], 64.0) == [64.0, 64.0]
    lengths.observe(prompt(1), 10.0)
    lengths.observe(prompt(2), 40.0)
    assert lengths.expected([prompt(1), prompt(2), prompt(3)], 64.0) == [10.0, 40.0, 25.0]
    lengths.observe(prompt(1), 20.0)
    assert lengths.expected([prompt(1)], 64.0) == [15.0]
    lengths.observe(prompt(1), 15.0)
    assert lengths.expected([prompt(1)], 64.0) == [15.0]


def test_expectations_are_the_same_to_the_bit_after_a_trip_through_json() -> None:
    lengths, again = ResponseLengths(), ResponseLengths()
    rng = random.Random(0)
    for _ in range(300):
        lengths.observe(prompt(rng.randint(0, 40)), rng.random() * 100)
    again.load_state(json.loads(json.dumps(lengths.state(), sort_keys=True)))
    asked = [prompt(number) for number in range(60)]
    assert again.expected(asked, 1.0) == lengths.expected(asked, 1.0)


def test_prompt_counts_once_a_group_and_little() -> None:
    assert group_work(prompt(1, 50), 7.0, 4) == 28.0 + 50 * PROMPT_TOKEN_WORK
