"""Consoles that break at random moments of a run; see broken_consoles.py.

HYBRIDRL_MOMENTS says how many there are of each kind.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from broken_consoles import WAYS, Started, Way, by_pipe, close, ended_run, whole_s

COUNT = int(os.environ.get("HYBRIDRL_MOMENTS", "10"))


@pytest.mark.dist
def test_a_run_trains_on_without_a_console_and_saves_at_ctrl_c(tmp_path: Path) -> None:
    """As with `2>&1 | tee log`: tee is gone first. Both ranks print more than pipes hold."""

    def act(run: Started) -> None:
        close(run)
        time.sleep(1.0)
        run.process.send_signal(signal.SIGINT)

    way = Way(by_pipe, act, 130)
    ended = ended_run(tmp_path, way, 3.0, "steps.num_steps=100000")
    assert ended.is_right(way), ended


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.parametrize("name", WAYS)
def test_a_run_goes_on_or_saves_whatever_happens_to_its_console(name: str, tmp_path: Path) -> None:
    way, chance = WAYS[name], random.Random(0)
    longest = whole_s(tmp_path / "whole", way.start)
    for index in range(COUNT):
        moment_s = chance.uniform(0, longest)
        ended = ended_run(tmp_path / str(index), way, moment_s)
        print(f"after {moment_s:.2f} of {longest:.2f} s: {ended}")
        assert ended.is_right(way), (moment_s, ended)
