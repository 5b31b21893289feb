"""The benchmark of what ranks take to compare their tokens: both ways are timed, over two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_agreement.py"


@pytest.mark.full
@pytest.mark.dist
def test_agreement_benchmark_times_memory_and_messages(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, str(BENCHMARK), "--out", str(out)]
    done = subprocess.run(
        [*command, "--steps", "20", "--step-ms", "1"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["us_per_step"]
    assert len(found) == 4
    assert all(taken["step"] > 1000 and taken["comparison"] > 0 for taken in found.values())
