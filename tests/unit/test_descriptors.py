"""Limits of open files: raised at the start of a rank, refused where they are too low."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hybridrl.parallel.descriptors import num_needed, shortage
from hybridrl.parallel.layout import TrainLayout

# Starts one rank of one, after the limits were set as on most hosts; then tries a larger job.
RANK = """
import resource, sys
from pathlib import Path
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from hybridrl.parallel.joining import start_process_group
from hybridrl.platform import Platform
start_process_group(Platform.detect(), 60)
print(resource.getrlimit(resource.RLIMIT_NOFILE))
from hybridrl.parallel.descriptors import shortage
from hybridrl.parallel.layout import TrainLayout
print(shortage(256, [TrainLayout(256)], True))
"""


@pytest.mark.full
def test_a_rank_raises_its_soft_limit_and_says_what_is_needed_beyond_the_hard_one() -> None:
    arguments = [sys.executable, "-c", RANK, "256", "1024"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    limits, said = done.stdout.splitlines()
    assert limits == "(1024, 1024)"
    needed = num_needed(256, [TrainLayout(256)], is_cpu=True)
    assert "(ulimit -n): got 1024" in said and f"at least {needed} for 256 ranks" in said, said


@pytest.mark.parametrize("layout", [TrainLayout(1), TrainLayout(8, tp=2, pp=2, cp=2)])
def test_usual_limits_are_enough_for_few_ranks(layout: TrainLayout) -> None:
    assert shortage(layout.world_size, [layout], is_cpu=True) is None
