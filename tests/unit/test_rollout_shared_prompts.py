"""Tests of which queued requests wait for another one with the same prompt."""

from __future__ import annotations

import dataclasses

from hybridrl.rollout.engine import Request, SamplingParams
from hybridrl.rollout.sglang.shared_prompts import SharedPrompts

SAMPLING = SamplingParams(max_new_tokens=4)


def samples(prompts: list[str], num: int) -> list[Request]:
    """Returns `num` requests to each prompt, numbered from 0 on."""
    asked = [tuple(map(ord, prompt)) for prompt in prompts for _ in range(num)]
    return [Request(number, prompt, number, SAMPLING) for number, prompt in enumerate(asked)]


def numbers(requests: list[Request]) -> list[int]:
    return [request.request_id for request in requests]


def test_samples_wait_for_the_first_one_of_their_prompt_alone() -> None:
    shared, queued = SharedPrompts(worth_tokens=1), samples(["one", "two"], 3)
    begun = shared.due(queued, lambda number: False)
    assert numbers(begun) == [0, 3]
    queued = [one for one in queued if one not in begun]
    assert shared.due(queued, {0, 3}.__contains__) == []
    assert numbers(shared.due(queued, {3}.__contains__)) == [1, 2]
    queued = queued[2:]
    assert shared.due(queued, {3}.__contains__) == []
    assert numbers(shared.due(queued, lambda number: False)) == [4, 5]


def test_requests_that_come_later_wait_with_the_others_or_do_not() -> None:
    shared, queued = SharedPrompts(worth_tokens=1), samples(["one"], 3)
    assert numbers(shared.due(queued, lambda number: False)) == [0]
    late = [Request(7, queued[0].prompt, 7, SAMPLING), Request(8, (1, 2), 8, SAMPLING)]
    assert numbers(shared.due([*queued[1:], *late], {0}.__contains__)) == [8]
    assert numbers(shared.due([*queued[1:], *late[:1]], lambda number: False)) == [1, 2, 7]


def test_nobody_waits_for_less_than_it_takes() -> None:
    queued = samples(["one", "two"], 3)  # 2 times 2 samples could take over 2 tokens each
    assert numbers(SharedPrompts(8).due(queued, lambda number: False)) == [0, 3]
    assert SharedPrompts(9).due(queued, lambda number: False) == queued
    assert SharedPrompts(1).due(samples(["one", "two"], 1), lambda number: False)


def test_a_number_that_is_taken_again_is_no_reason_to_wait() -> None:
    """The first request of the same prompts, asked for again, is not the one of before."""
    shared, queued = SharedPrompts(worth_tokens=1), samples(["one"], 3)
    for _ in range(2):
        assert numbers(shared.due(queued, lambda number: False)) == [0]
        assert numbers(shared.due(queued[1:], lambda number: False)) == [1, 2]
    assert numbers(shared.due(queued, lambda number: False)) == [0]
    shared.forget()
    assert numbers(shared.due(queued[1:], lambda number: False)) == [1]


def test_few_prompts_are_computed_ahead_of_their_samples() -> None:
    shared, queued = SharedPrompts(worth_tokens=1, ahead_tokens=5), samples(list("abcd"), 2)
    queued = [dataclasses.replace(one, prompt=one.prompt * 3) for one in queued]
    begun: list[list[int]] = []
    while queued:
        begun.append(numbers(shared.due(queued, lambda number: False)))
        queued = [one for one in queued if one.request_id not in begun[-1]]
    assert begun == [[0, 2], [1, 3, 4, 6], [5, 7]]
    assert numbers(shared.due(samples(["abc"], 2), lambda number: False)) == [0]


def test_no_further_prompt_is_computed_while_enough_are() -> None:
    shared, queued = SharedPrompts(worth_tokens=1, ahead_tokens=5), samples(["aaa", "bbb", "c"], 2)
    assert numbers(shared.due(queued, lambda number: False)) == [0, 2]
    queued = [queued[1], *queued[3:]]
    assert shared.due(queued, {0, 2}.__contains__) == []
    assert numbers(shared.due(queued, {2}.__contains__)) == [1, 4]
