"""Tests of when engines stop together: at which step, on what counts, and who waits for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from hybridrl.generation.joint_stop import STEPS_BETWEEN_SUMS, JointStop

Wait = Callable[[], torch.Tensor]


class Sums:
    """Sums over ranks that are threads; each wait ends when all have begun."""

    def __init__(self, size: int) -> None:
        self.begun = [0] * size
        self._parts: list[list[torch.Tensor]] = []
        self._changed = threading.Condition()
        self._size = size

    def of(self, rank: int) -> Callable[[torch.Tensor], Wait]:
        def begin(values: torch.Tensor) -> Wait:
            with self._changed:
                number = self.begun[rank]
                self.begun[rank] += 1
                if number == len(self._parts):
                    self._parts.append([])
                self._parts[number].append(values)
                self._changed.notify_all()
            return lambda: wait(number)

        def wait(number: int) -> torch.Tensor:
            with self._changed:
                assert self._changed.wait_for(lambda: len(self._parts[number]) == self._size, 20)
                return torch.stack(self._parts[number]).sum(0)

        return begin


def run(sums: Sums, rank: int, finishes: list[int], needed: int) -> int:
    """Takes steps, of which `finishes` end a group each, until `needed` are complete over all."""
    stop = JointStop(sums.of(rank), lambda found: found[0] >= needed)
    for num_steps in range(1000):
        done = sum(one <= num_steps for one in finishes)
        if stop.is_reached(num_steps, lambda done=done: [done]):
            return num_steps
    raise AssertionError("it never ended")


def on_two(finishes: list[list[int]], needed: int) -> tuple[list[int], Sums]:
    """Returns where each of two ranks ended."""
    sums, ended = Sums(2), [0, 0]

    def one(rank: int) -> None:
        ended[rank] = run(sums, rank, finishes[rank], needed)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return ended, sums


@pytest.mark.parametrize(
    ("finishes", "needed", "expected"),
    [
        ([[0], [0]], 2, 0),  # before the first step it is read at once
        ([[1], [1]], 2, 16),  # counted at 8, read at 16
        ([[8], [8]], 2, 16),
        ([[9], [8]], 2, 24),
        ([[20, 30], [33]], 2, 40),
        ([[20, 30], [33]], 3, 48),
    ],
)
def test_all_ranks_end_at_a_step_that_follows_from_the_counts(
    finishes: list[list[int]], needed: int, expected: int
) -> None:
    ended, sums = on_two(finishes, needed)
    assert ended == [expected, expected]
    # A sum that nobody reads would meet the next exchange of the ranks.
    assert sums.begun == [max(expected // STEPS_BETWEEN_SUMS, 1)] * 2


def test_a_rank_that_is_a_sum_ahead_does_not_wait() -> None:
    parts: list[list[int]] = []

    def stop_of(rank: int) -> JointStop:
        number = -1

        def begin(values: torch.Tensor) -> Wait:
            nonlocal number
            number += 1
            while len(parts) <= number:
                parts.append([])
            parts[number].append(rank)
            return lambda now=number: wait(now)

        def wait(number: int) -> torch.Tensor:
            assert number == 0 or sorted(parts[number]) == [0, 1], f"waits for sum {number}"
            return torch.zeros(1)

        return JointStop(begin, lambda found: False)

    both, at = [stop_of(0), stop_of(1)], [0, 0]
    # Each is in turn up to 15 steps ahead of the last step of the other one.
    for rank, until in [(0, 16), (1, 9), (0, 24), (1, 32), (0, 25), (1, 40), (0, 48)]:
        for num_steps in range(at[rank], until):
            assert not both[rank].is_reached(num_steps, lambda: [0])
        at[rank] = until
