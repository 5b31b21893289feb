"""The schedule of a run with a lag: sides make the same transfers, and versions are in time."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hybridrl.generation.beside import Beside
from hybridrl.generation.idle import Clock, added, idle_shares
from hybridrl.generation.timeline import TRANSFERS, Side, Timeline, Turn, turns

STEPS = 6
SIDES: tuple[Side, ...] = ("rollout", "training", "both")


def schedule(side: Side) -> list[Turn]:
    return [turn for step in range(STEPS) for turn in turns(step, side)]


def test_all_sides_make_the_same_transfers_in_the_same_order() -> None:
    found = [[turn for turn in schedule(side) if turn.action in TRANSFERS] for side in SIDES]
    assert found[0] == found[1] == found[2]
    assert found[0][:3] == [(0, "samples", 0), (0, "weights", 1), (1, "samples", 1)]


def test_each_side_can_go_on_whatever_the_other_takes() -> None:
    """Both take turns in any order that transfers allow: no order leaves them waiting."""
    for first in ("rollout", "training"):
        queues = {side: schedule(side) for side in ("rollout", "training")}
        beside = 0
        while any(queues.values()):
            order = sorted(queues, key=lambda side: side != first)
            own = [
                side for side in order if queues[side] and queues[side][0].action not in TRANSFERS
            ]
            if own:  # the first side as far as it gets before the other one moves
                beside += len(own) > 1 and queues["training"][0].action == "train"
                queues[own[0]].pop(0)
                continue
            one, other = (queues[side].pop(0) for side in order)
            assert one == other
        assert first != "rollout" or beside == STEPS  # training waits for no generation ahead


def test_generation_has_the_weights_that_were_trained_last() -> None:
    trained = 0
    for turn in schedule("both"):
        if turn.action == "weights":
            trained = turn.version
        else:
            assert turn.version == trained == turn.step
    for turn in schedule("rollout"):
        if turn.action == "generate_ahead":  # for the next step: one version old there
            assert turn.step + 1 - turn.version == 1


def test_a_further_round_follows_the_samples_of_its_step_alone() -> None:
    for side in SIDES:
        timeline = Timeline(side)
        timeline.begin(3)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="a further round of step 4"):
                timeline.begin_round(4)
            timeline.take("generate", 3)
            timeline.take("samples", 3)
            timeline.begin_round(3)
        timeline.take("generate", 3)
        timeline.take("samples", 3)
        for turn in turns(3, side):
            if turn.action not in ("generate", "samples"):
                timeline.take(turn.action, turn.version)
        assert [turn.action for turn in timeline.taken].count("samples") == 3
        with pytest.raises(RuntimeError, match="not its samples"):
            timeline.begin_round(3)


def test_times_of_rounds_add_up_where_they_are_known() -> None:
    first, second = [Clock(1.0, 2.0, 4.0)] * 2, [Clock(0.5, 0.5, 1.0)] * 2
    assert added(first, second) == [Clock(1.5, 2.5, 5.0)] * 2
    assert added((), second) == second == added([Clock(3.0)] * 2, second)


def test_another_order_or_version_is_refused() -> None:
    timeline = Timeline("rollout")
    timeline.begin(3)
    timeline.take("train", 3)  # of the other side
    timeline.take("generate", 3)
    with pytest.raises(RuntimeError, match="weights with version 4 where the schedule has"):
        timeline.take("weights", 4)
    timeline.begin(3)
    with pytest.raises(RuntimeError, match="generate with version 2"):
        timeline.take("generate", 2)
    assert list(timeline.taken) == [(3, "generate", 3)]


def test_idle_shares_are_means_of_a_side() -> None:
    clocks = [Clock(0.0, 2.0, 8.0), Clock(3.0, 7.0, 8.0), Clock(5.0, 7.0, 8.0)]
    assert idle_shares(clocks, (1, 2)) == {"idle/training": 0.25, "idle/rollout": 0.5}
    assert idle_shares([*clocks[:2], Clock(1.0)], (1, 2)) == {}


def test_work_beside_is_joined_and_its_errors_are_raised() -> None:
    beside, goes = Beside(torch.device("cpu")), threading.Event()

    def wait() -> None:
        goes.wait(10)
        time.sleep(0.01)

    assert beside.join(lambda: None)  # nothing runs
    beside.start(wait, "waiting")
    with pytest.raises(RuntimeError, match="not joined"):
        beside.start(wait, "again")
    assert not beside.join(lambda: None, timeout_s=0.0)
    goes.set()
    assert beside.join(lambda: None) and beside.span is not None
    assert beside.span.name == "waiting" and beside.span.ended - beside.span.began >= 0.01

    def fail() -> None:
        raise ValueError("planted")

    beside.start(fail, "failing")
    with pytest.raises(ValueError, match="planted"):
        beside.join(lambda: None)
    assert beside.join(lambda: None)
    beside.start(lambda: goes.wait(0.2) and time.sleep(0.2), "long")
    with pytest.raises(KeyError):  # a rank is lost meanwhile
        beside.join(lambda: {}["lost"])
    assert beside.join(lambda: None)
