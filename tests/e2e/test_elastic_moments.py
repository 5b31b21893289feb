"""Ranks and whole nodes are killed at random moments; see elastic_moments.py.

HYBRIDRL_MOMENTS says how many there are.
"""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
from elastic_moments import job_on_nodes, largest_differences, moments
from network_nodes import CAN_MAKE

COUNT = int(os.environ.get("HYBRIDRL_MOMENTS", "6"))


@pytest.mark.dist
@pytest.mark.full
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
