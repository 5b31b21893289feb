"""How long ranks wait for each other, and work on a thread beside the main one."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from hybridrl.generation.background import BackgroundThread
from hybridrl.generation.sampler_metrics import Clock, add_clocks, idle_shares


def test_times_of_rounds_add_up_where_they_are_known() -> None:
    first, second = [Clock(1.0, 2.0, 4.0)] * 2, [Clock(0.5, 0.5, 1.0)] * 2
    assert add_clocks(first, second) == [Clock(1.5, 2.5, 5.0)] * 2
    assert add_clocks((), second) == second == add_clocks([Clock(3.0)] * 2, second)


def test_idle_shares_are_means_of_a_side() -> None:
    clocks = [Clock(0.0, 2.0, 8.0), Clock(3.0, 7.0, 8.0), Clock(5.0, 7.0, 8.0)]
    assert idle_shares(clocks, (1, 2)) == {"idle/training": 0.25, "idle/rollout": 0.5}
    assert idle_shares([*clocks[:2], Clock(1.0)], (1, 2)) == {}


def test_work_beside_is_joined_and_its_errors_are_raised() -> None:
    beside, goes = BackgroundThread(torch.device("cpu")), threading.Event()

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
