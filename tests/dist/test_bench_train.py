"""The training benchmark's own checks: it times real steps, and says what failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_bench_reshard import TINY

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_train.py"


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny model over gloo")
def test_training_benchmark_times_passes_and_compares_packing(tmp_path: Path) -> None:
    model, out = {**TINY, "architectures": ["Qwen2ForCausalLM"]}, tmp_path / "times.json"
    (tmp_path / "qwen2.5-tiny.json").write_text(json.dumps(model))
    command = [sys.executable, str(BENCHMARK), "tiny/tp1dp2", "--out", str(out), "--tails"]
    command += ["--models", str(tmp_path), "--iterations", "2", "--micro-batches", "2"]
    command += ["--prompt-tokens", "8", "--response-tokens", "24", "--micro-batch-tokens", "256"]
    command += ["--set", "train.recompute=selective", "--samples", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = json.loads(out.read_text())["cases"]
    passes = case["passes"]
    shared = {"logprobs, shared", "update, shared"}
    assert passes.keys() == {"logprobs", "update", *shared, "tails packed", "tails padded"}
    assert case["shared_to_not"].keys() == {"logprobs", "update"}
    assert 0 < case["shared_difference"] < 1e-4  # fp32, another order of sums
    assert all(0 < found["mfu"] < 1.5 and found["peak_bytes"] > 0 for found in passes.values())
    assert passes["update"]["tokens"] == 2 * 2 * 256  # micro-batches of both replicas, all full
    assert passes["update"]["ms"] > passes["logprobs"]["ms"]
    assert (
        passes["tails packed"]["share_of_padding"] == 0 < passes["tails padded"]["share_of_padding"]
    )
    assert all(len(found["all_ms"]) == 2 for found in passes.values())
    parts = case["update_parts_ms"]
    assert parts["accumulate"] > parts["apply"] > 0 < parts["grad_norm"]
    assert parts["whole"] > sum(ms for name, ms in parts.items() if name != "whole")
    assert case["packed_to_padded"] > 0 and "torch" in case["layers"]
