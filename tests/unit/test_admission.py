"""When requests of agents enter the engine, in a simulation of engine steps."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

import pytest

from hybridrl.generation.admission import COST_OF_BEGIN, MAX_WAIT_STEPS, Admission

Due = Callable[[int, int, int], bool]


def num_steps_of(
    due: Due,
    lengths: Callable[[int], int],
    turns: Sequence[int],
    note: Callable[[list[int]], None] = lambda lengths: None,
) -> float:
    """Returns the time in which sessions have their turns, in steps of the engine. A session asks
    for its next turn immediately; the endpoint answers one session per 0.1 steps.

    Args:
        lengths: Returns the length of a session's next turn.
        turns: Number of turns of each session.
        note: Receives the length of each turn that begins.
    """
    time, free_at = 0.0, 0.0
    left, running = dict(enumerate(turns)), dict[int, int]()
    arriving: list[tuple[float, int]] = []

    def ask(session: int) -> None:
        nonlocal free_at
        free_at = max(free_at, time) + 0.1
        heapq.heappush(arriving, (free_at, session))

    for session in left:
        ask(session)
    waiting: list[int] = []
    while running or waiting or arriving:
        if not running and not waiting:
            time = max(time, arriving[0][0])
        while arriving and arriving[0][0] <= time:
            waiting.append(heapq.heappop(arriving)[1])
        if waiting and (not running or due(len(waiting), len(running), 1)):
            running |= {session: lengths(session) for session in waiting}
            note([running[session] for session in waiting])
            waiting, time = [], time + COST_OF_BEGIN
        time += 1
        for session in list(running):
            running[session] -= 1
            if not running[session]:
                del running[session]
                left[session] -= 1
                if left[session]:
                    ask(session)
    return time


def every(period: int) -> Due:
    since = [0]

    def due(num_waiting: int, num_running: int, num_steps: int) -> bool:
        since[0] += num_steps
        is_over = since[0] >= period
        since[0] *= not is_over
        return is_over

    return due


@pytest.mark.parametrize(
    ("num_short", "length", "num_turns"), [(1, 20, 200), (1, 64, 60), (16, 40, 100)]
)
def test_programs_with_short_turns_do_not_wait_for_those_with_long_turns(
    num_short: int, length: int, num_turns: int
) -> None:
    def total(due: Due, admission: Admission | None = None) -> float:
        turns = [num_turns] * num_short + [1] * (256 - num_short)
        note = (admission or Admission()).note_lengths
        return num_steps_of(due, lambda n: length if n < num_short else 4000, turns, note)

    admission = Admission()
    assert total(admission.is_due, admission) <= 1.45 * total(every(1))
    admission = Admission()
    found = [admission.is_due(1, 255, 1) for _ in range(2 * MAX_WAIT_STEPS)]
    assert [place + 1 for place, is_due in enumerate(found) if is_due] == [
        MAX_WAIT_STEPS,
        2 * MAX_WAIT_STEPS,
    ]


@pytest.mark.parametrize("sessions", [2, 16, 256])
@pytest.mark.parametrize("mean", [64, 512])
@pytest.mark.parametrize("varies", [False, True])
def test_no_fixed_number_of_steps_is_much_better(sessions: int, mean: int, varies: bool) -> None:
    def total(due: Due) -> float:
        rng = random.Random(0)
        low, high = (mean // 4, 2 * mean - mean // 4) if varies else (mean, mean)
        return num_steps_of(due, lambda session: rng.randint(low, high), [6] * sessions)

    admission = Admission()
    admission.note_lengths([mean] * 300)
    fixed = {period: total(every(period)) for period in (1, 2, 4, 8, 16, 32, 64)}
    assert total(admission.is_due) <= 1.08 * min(fixed.values()), fixed


def test_few_requests_and_an_empty_engine_never_wait() -> None:
    admission = Admission()
    assert not admission.is_due(0, 5, 100)
    assert admission.is_due(1, 3, 1)  # 3.5 * 4**2 is less than 128
    assert not admission.is_due(1, 40, 1)
    assert admission.is_due(1, 0, 1)
    admission.note_lengths([5000] * 300)
    assert admission.is_due(1, 30, 1)


def test_waiting_ends_when_it_has_cost_as_much_as_a_beginning() -> None:
    admission = Admission(cost=2.0)
    found = [admission.is_due(25, 75, 1) for _ in range(16)]
    assert [place for place, is_due in enumerate(found) if is_due] == [7, 15]
    assert [admission.is_due(25, 75, 4) for _ in range(4)] == [False, True, False, True]
