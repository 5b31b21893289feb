"""Ranks and whole nodes are killed at random moments, and in each phase; see elastic_moments.py.
Their copies in memory are removed; see removed_copies.py.

HYBRIDRL_MOMENTS says how many random ones there are.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from elastic_moments import KEYS, Job, job_on_nodes, largest_differences, moments, wait_for
from killed_in_phases import FILE
from network_nodes import CAN_MAKE
from removed_copies import removals

PHASES = ("generate", "reward", "logprobs", "advantages", "update", "checkpoint", "reshard")
COUNT = int(os.environ.get("HYBRIDRL_MOMENTS", "6"))
# Seconds: each moment and what follows it, then the same steps without losses.
LIMIT_S = 300 + 60 * COUNT


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(not CAN_MAKE, reason="needs root and iproute2 for network namespaces")
def test_a_job_goes_on_after_losses_at_random_moments(tmp_path: Path) -> None:
    with job_on_nodes(tmp_path, "steps.num_steps=1000000", "run.max_restarts=1000") as job:
        for moment in moments(job, COUNT, random.Random(0)):
            print(moment)
            assert moment.took_s < 60 * moment.num_losses
            assert moment.lost_steps <= 1 or moment.num_losses > 1
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(120) == 143
    found = largest_differences(job, tmp_path / "unbroken")
    print(found)
    assert found["reward/mean"] == 0 and found["policy/loss"] < 1e-5


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.skipif(not CAN_MAKE, reason="needs root and iproute2 for network namespaces")
def test_a_job_goes_on_when_copies_in_memory_are_removed_at_random_moments(tmp_path: Path) -> None:
    with job_on_nodes(tmp_path, "steps.num_steps=1000000", "run.max_restarts=1000") as job:
        for removal in removals(job, COUNT, random.Random(0)):
            print(removal)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(120) == 143
    assert len(job.starts()) == 1
    found = largest_differences(job, tmp_path / "unbroken")
    assert found["reward/mean"] == 0 and found["policy/loss"] < 1e-5


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.skipif(not CAN_MAKE, reason="needs root and iproute2 for network namespaces")
def test_a_rank_or_node_that_is_killed_in_any_phase_is_replaced(tmp_path: Path) -> None:
    """The node that takes its place has nothing in memory."""
    knobs = ("reward.function=killed_in_phases:digits", "reward.isolated=false")
    knobs += ("steps.num_steps=1000000", "run.max_restarts=1000", "checkpoint.every=0")
    with job_on_nodes(tmp_path, *knobs) as job:
        wait_for(job, 2)
        times = list[float]()
        for number, phase in enumerate(PHASES):
            for what in ("rank", "node"):
                took_s, lost = lose(job, phase, (number + (what == "node")) % 3, what)
                print(f"{what} in {phase}: a step after {took_s:.1f} s, {lost} steps lost")
                assert lost <= 1
                times.append(took_s)
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(120) == 143
        assert [one["world_size"] for one in job.starts()] == [3] * (2 * len(PHASES) + 1)
    found = largest_differences(job, tmp_path / "unbroken", 3)
    assert set(found.values()) == {0}  # the layout was the same all the time
    assert max(times) < 60


@pytest.mark.dist
@pytest.mark.full
@pytest.mark.skipif(not CAN_MAKE, reason="needs root and iproute2 for network namespaces")
def test_with_a_lag_a_killed_rank_or_node_costs_no_group(tmp_path: Path) -> None:
    """Groups that were finished for later steps are in the copies, and their samples of older
    weights with them: each step has the samples that it would have had.
    """
    knobs = ("steps.max_policy_lag=1", "rollout.in_flight=12", "rollout.max_batch=8")
    more = ("reward.function=killed_in_phases:digits", "reward.isolated=false")
    more += ("steps.num_steps=1000000", "run.max_restarts=1000", "checkpoint.every=0")
    with job_on_nodes(tmp_path, *knobs, *more) as job:
        wait_for(job, 3)
        for number, phase in enumerate(("generate", "update", "reward", "reshard")):
            took_s, lost = lose(job, phase, number % 3, ("rank", "node")[number % 2])
            print(f"{phase}: a step after {took_s:.1f} s, {lost} steps lost")
            assert lost <= 1
        job.process.send_signal(signal.SIGTERM)
        assert job.process.wait(120) == 143
        assert {one["world_size"] for one in job.starts()} == {3}
        records = job.records()
    assert max(one["lag/waiting"] for one in records) > 0 < max(one["lag/max"] for one in records)
    keys = (*KEYS, "lag/mean", "lag/waiting", "lag/unfinished")
    found = largest_differences(job, tmp_path / "unbroken", 3, *knobs, keys=keys)
    assert set(found.values()) == {0}, found


def lose(job: Job, phase: str, rank: int, what: str) -> tuple[float, int]:
    """Loses a rank or node in a phase; returns seconds and finished steps that it cost."""
    num_starts, wanted = len(job.starts()), job.run_folder / FILE
    wanted.with_suffix(".new").write_text(f"{phase} {rank} {what}")
    wanted.with_suffix(".new").rename(wanted)
    deadline = time.monotonic() + 120
    while wanted.exists():
        job.check()
        assert time.monotonic() < deadline, phase
        time.sleep(0.01)
    killed, before = time.monotonic(), job.last()
    while len(job.starts()) == num_starts or job.last() <= job.starts()[-1]["after_step"]:
        job.check()
        assert time.monotonic() - killed < 120, Path(job.output.name).read_text()[-6000:]
        time.sleep(0.02)
    after = min(one["after_step"] for one in job.starts()[num_starts:])
    return time.monotonic() - killed, before - after
