"""Which groups a step takes, when it may end, and who goes on with them: pure functions."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from hybridrl.contracts.batch import Prompt
from hybridrl.generation.sampler_metrics import lag_metrics, queue_metrics
from hybridrl.generation.schedule import (
    SYNCHRONOUS,
    Group,
    Schedule,
    assign_replicas,
    remaining_tokens,
)

SCHEDULE = Schedule(max_lag=1, per_step=2, in_flight=3)


def group(number: int, born: int = 0, done: str = "..", tokens: int = 0) -> Group:
    """Returns a group; `done` has an x for each finished sample."""
    runs = (((born, tokens),) if tokens else (),) * len(done)
    prompt = Prompt(number, "p", (number, 1))
    return Group(number, born, 0, prompt, None, runs, tuple(one == "x" for one in done))


@pytest.mark.parametrize(
    ("complete", "held", "ends"),
    [
        ([0, 1], [0, 3], False),  # one complete group does not make a step of two
        ([0, 2], [0, 3], True),
        ([1, 1], [1, 2], True),
        ([0, 2], [1, 2], False),  # the oldest must be of this step
    ],
)
def test_a_step_ends_with_its_groups_and_with_what_may_not_be_older(
    complete: list[int], held: list[int], ends: bool
) -> None:
    assert SCHEDULE.may_end(complete, held) is ends
    drops = Schedule(1, 2, 3, "drop")
    assert drops.may_end(complete, held) is (sum(complete) >= 2)


def test_a_step_leaves_no_more_than_later_steps_can_take() -> None:
    schedule = Schedule(max_lag=2, per_step=2, in_flight=6)
    # Four would have to be taken in the next step: one of the older ones is waited for.
    assert not schedule.may_end([0, 0, 2], [0, 3, 2])
    assert schedule.may_end([0, 1, 1], [0, 3, 2])


def test_the_oldest_complete_groups_are_taken() -> None:
    groups = [group(4, 1, "xx"), group(2, 1, "xx"), group(0, 0, "x."), group(3, 1, "xx")]
    taken, left, late = Schedule(1, 2, 3, "drop").choose(groups, 1)
    assert [one.number for one in taken] == [2, 3]
    assert [one.number for one in left] == [4]
    assert [one.number for one in late] == [0]  # thrown away: it is of step 0
    assert [one.number for one in SCHEDULE.choose(groups, 0)[1]] == [0, 4]


@pytest.mark.parametrize(("lag", "in_flight"), [(1, 4), (1, 6), (1, 8), (2, 11), (3, 16)])
def test_no_group_is_learned_from_too_late(lag: int, in_flight: int) -> None:
    """Random lengths, long ones among them: with all that is allowed under way."""
    schedule, draw = Schedule(lag, 4, in_flight), random.Random(lag * 100 + in_flight)
    lengths: dict[int, int] = {}
    done: dict[int, int] = {}
    held: list[Group] = []
    taken_in: dict[int, int] = {}
    for step in range(60):
        for _ in range(in_flight - len(held)):
            number = len(lengths)
            lengths[number], done[number] = draw.choice([1, 2, 3, 40, 90]), 0
            held.append(group(number, step))
        while True:
            held = [
                group(
                    one.number, one.born, "xx" if done[one.number] >= lengths[one.number] else "x."
                )
                for one in held
            ]
            born = schedule.by_deadline([one.born for one in held], step)
            whole = [one.born for one in held if one.is_complete]
            if schedule.may_end(schedule.by_deadline(whole, step), born):
                break
            done = {number: tokens + 1 for number, tokens in done.items()}
        taken, held, late = schedule.choose(held, step)
        assert len(taken) == 4 and not late
        assert all(step - one.born <= lag for one in taken)
        assert not taken_in.keys() & {one.number for one in taken}
        taken_in |= {one.number: step for one in taken}
    assert taken_in.keys() | {one.number for one in held} == set(lengths)


@pytest.mark.parametrize(("lag", "in_flight"), [(1, 4), (1, 6), (1, 8), (2, 9), (2, 12)])
def test_lengths_that_are_all_equal_take_no_more_steps_of_an_engine(
    lag: int, in_flight: int
) -> None:
    schedule, length, num_steps = Schedule(lag, 4, in_flight), 40, 0
    left: dict[int, int] = {}
    born: dict[int, int] = {}
    held: list[int] = []
    for step in range(24):
        for _ in range(schedule.num_new(len(held))):
            held.append(len(left))
            born[held[-1]], left[held[-1]] = step, length
        while True:
            found = [group(one, born[one], ".." if left[one] else "xx") for one in held]
            whole = [one.born for one in found if one.is_complete]
            of_all = [one.born for one in found]
            if schedule.may_end(*(schedule.by_deadline(b, step) for b in (whole, of_all))):
                break
            left = {number: max(tokens - 8, 0) for number, tokens in left.items()}
            num_steps += 8
        held = [one.number for one in schedule.choose(found, step)[1]]
    assert num_steps <= 24 * length


@pytest.mark.parametrize(("lag", "in_flight"), [(1, 4), (1, 6), (1, 8), (2, 11), (3, 16)])
def test_further_rounds_of_a_step_end_and_leave_nothing_too_late(lag: int, in_flight: int) -> None:
    """After its groups a step takes further ones, up to twice, for those that teach nothing."""
    schedule, draw = Schedule(lag, 4, in_flight), random.Random(lag * 10 + in_flight)
    left: dict[int, int] = {}  # tokens that a group still needs, by number
    born: dict[int, int] = {}
    held: list[int] = []
    num_taken = num_rounds = 0
    for step in range(60):
        for room in (4, draw.randint(0, 4), draw.randint(0, 4)):
            if not room:
                break
            for _ in range(schedule.num_new(len(held), room=room)):
                held.append(len(left))
                born[held[-1]], left[held[-1]] = step, draw.choice([1, 2, 3, 40, 90])
            for _ in range(200):
                found = [group(one, born[one], "xx" if not left[one] else "x.") for one in held]
                whole = [one.born for one in found if one.is_complete]
                of_all = [born[one] for one in held]
                if schedule.may_end(
                    *(schedule.by_deadline(b, step) for b in (whole, of_all)), room
                ):
                    break
                for number in held:
                    left[number] = max(left[number] - 1, 0)
            else:
                raise AssertionError("the round does not end")
            taken, kept, late = schedule.choose(found, step, room)
            assert len(taken) == room and not late
            assert all(step - one.born <= lag for one in taken)
            held = [one.number for one in kept]
            num_taken, num_rounds = num_taken + room, num_rounds + 1
    assert num_rounds > 100 and num_taken + len(held) == len(left)


def test_without_a_lag_a_step_takes_all_that_it_begins() -> None:
    schedule = Schedule(max_lag=0, per_step=3, in_flight=3)
    groups = [group(number, 4, "xx") for number in range(3)]
    assert schedule.num_new(0) == 3 and schedule.choose(groups, 4) == (groups, [], [])
    assert schedule.may_end([3], [3]) and not schedule.may_end([2], [3])
    assert not (schedule.carries_over or SYNCHRONOUS.carries_over or schedule.generates_ahead)


def test_what_goes_on_is_dealt_by_what_is_left_of_it() -> None:
    groups = [
        group(0, 0, "..", tokens=0),
        group(1, 0, "x.", tokens=90),  # 10 tokens are left
        group(2, 0, "..", tokens=0),
        group(3, 0, "x.", tokens=120),  # longer than expected: half of 80
    ]
    expected = dict.fromkeys(range(4), 100.0)
    dealt = assign_replicas(groups, expected, longest=200, num_replicas=2)
    assert dealt[0] != dealt[2] and dealt[1] != dealt[3]
    assert [remaining_tokens(have, 100.0, 200) for have in (0, 90, 120, 200)] == [100, 10, 40, 0]


def test_a_complete_group_stays_where_it_is() -> None:
    whole = replace(group(0, 0, "xx", tokens=5), replica=1)
    dealt = assign_replicas([whole, group(1), group(2)], dict.fromkeys(range(3), 10.0), 20, 2)
    assert dealt[0] == 1 and {dealt[1], dealt[2]} == {0, 1}


def test_new_groups_go_to_the_replica_with_less_work_that_cannot_move() -> None:
    pinned = [replace(group(n, 0, "..", tokens=0), replica=1) for n in range(3)]
    done = replace(group(3, 0, "xx", tokens=90), replica=0)  # has no work left
    groups = [*pinned, done, *(group(n, 1, "..", tokens=0) for n in range(4, 9))]
    expected = dict.fromkeys(range(9), 100.0)
    dealt = assign_replicas(groups, expected, longest=200, num_replicas=2, moves=False)
    assert [dealt[n] for n in range(4)] == [1, 1, 1, 0]
    new = Counter(dealt[n] for n in range(4, 9))
    assert new == {0: 4, 1: 1}


def test_lag_is_of_tokens_and_versions_of_samples() -> None:
    one = group(0, 0, "xx")
    runs = (((0, 3), (1, 1)), ((1, 4),))
    taken = [Group(0, 0, 0, one.prompt, 0, runs, (True, True))]
    assert lag_metrics(taken, 3, 1) == {
        "lag/mean": 3 / 8,
        "lag/max": 1.0,
        "lag/mixed_share": 0.5,
        "lag/dropped": 3.0,
        "lag/token_share/0": 5 / 8,
        "lag/token_share/1": 3 / 8,
    }


def test_queue_counts_samples_of_groups_under_way() -> None:
    groups = [group(0, 0, "xx"), group(1, 0, "x."), group(2, 1, ".."), group(3, 1, "..")]
    assert queue_metrics(groups) == {"lag/unfinished": 5.0, "lag/waiting": 3.0}
    assert queue_metrics([]) == {"lag/unfinished": 0.0, "lag/waiting": 0.0}


@pytest.mark.parametrize(("lag", "in_flight"), [(-1, 2), (0, 3), (1, 1), (1, 5)])
def test_a_schedule_that_cannot_be_kept_is_refused(lag: int, in_flight: int) -> None:
    with pytest.raises(ValueError, match="in_flight"):
        Schedule(lag, 2, in_flight)


@pytest.mark.parametrize(
    ("lag", "in_flight", "until"), [(1, 4, 0), (1, 8, 2), (2, 8, 1), (2, 12, 6), (3, 14, 0)]
)
def test_what_is_generated_ahead_is_learned_from_in_time(
    lag: int, in_flight: int, until: int
) -> None:
    """While a step trains, groups are begun with its weights that later steps alone may take."""
    schedule, draw = Schedule(lag, 4, in_flight, ahead_until=until), random.Random(lag * 10 + until)
    left: dict[int, int] = {}  # tokens that a group still needs, by number
    born: dict[int, int] = {}
    held: list[int] = []
    taken_in: dict[int, int] = {}

    def begin(step: int, is_ahead: bool) -> None:
        for _ in range(schedule.num_new(len(held), is_ahead)):
            held.append(len(left))
            born[held[-1]], left[held[-1]] = step, draw.choice([1, 2, 3, 40, 90])

    def advance() -> None:
        for number in held:
            left[number] = max(left[number] - 1, 0)

    def groups() -> list[Group]:
        return [group(one, born[one], "xx" if not left[one] else "x.") for one in held]

    for step in range(40):
        begin(step, is_ahead=False)
        for _ in range(1000):
            found = groups()
            whole = [one.born for one in found if one.is_complete]
            of_all = [one.born for one in found]
            if schedule.may_end(*(schedule.by_deadline(b, step) for b in (whole, of_all))):
                break
            advance()
        taken, kept, late = schedule.choose(found, step)
        assert len(taken) == 4 and not late
        assert all(step - one.born <= lag for one in taken)
        taken_in |= {one.number: step for one in taken}
        held = [one.number for one in kept]
        begin(step, is_ahead=True)
        assert len(held) <= min(in_flight, 4 * lag)
        while sum(left[one] > 0 for one in held) > until:
            advance()
    assert taken_in.keys() | set(held) == set(left)
    # Something is begun ahead, and with a lag of 1 that is taken in the very next step.
    ahead = [taken_in[one] - born[one] for one in taken_in]
    assert max(ahead) == lag and (lag > 1 or min(ahead[4:]) >= 0)
