"""The reshard benchmark's own checks: four ways to the same bits, and bytes that add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_reshard.py"


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts over gloo")
def test_reshard_benchmark_counts_the_least_bytes_and_more_for_the_others(tmp_path: Path) -> None:
    out = tmp_path / "counts.json"
    command = [sys.executable, str(BENCHMARK), "--cases", "tp2pp2/tp4", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    (case,) = result["cases"]
    ways, size = case["ways"], result["model"]["bytes"]
    assert ways.keys() == {"hybrid_engine", "all_gather", "buckets", "hf_stream"}
    ours = ways["hybrid_engine"]
    assert ours["received_bytes"] == case["minimum_receive_bytes"]
    assert sum(ours["aliased_bytes"]) > 0
    assert max(ours["staging_bytes"]) <= result["model"]["staging_limit_bytes"]
    # Three quarters of the model come from elsewhere (of norms a half), or all of it.
    assert ways["all_gather"]["received_bytes"] == pytest.approx([0.75 * size] * 4, rel=1e-3)
    assert ways["hf_stream"]["received_bytes"][1:] == [size] * 3
