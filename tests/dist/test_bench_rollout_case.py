"""The rollout benchmark's own checks: a case tells what it does, and meets its limit."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from packaged import PACKAGED
from test_bench_reshard import TINY

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_rollout.py"
STUCK = """
import json, sys, time
import case_record

def wait_for_nothing():
    time.sleep(600)

case_record.WHERE_EVERY_S = 0.1
case = case_record.CaseRecord(json.loads(sys.argv[1]))
case.begin()
case.result["found"] = 7
case.save("a part", "of 7")
wait_for_nothing()
"""


@pytest.mark.dist
@pytest.mark.waits
def test_case_at_its_limit_leaves_what_it_knew_and_where_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    from bench_reshard_gpu import run_showing_progress
    from case_record import stacks_of

    job = {"case": "c", "folder": str(tmp_path), "limit_s": 12.0, "launched_at": time.time()}
    job["partial"] = str(tmp_path / "out.partial.json")
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARK.parent))
    command = [sys.executable, "-c", STUCK, json.dumps(job)]
    code, _ = run_showing_progress(command, job["limit_s"], {"RANK": "0"})
    assert code != 0
    for file in ("result.json", "out.partial.json"):
        found = json.loads((tmp_path / file).read_text())
        assert found["found"] == 7 and found["seconds"].keys() == {"starting", "a part"}
    assert "in wait_for_nothing" in stacks_of(tmp_path)["0"]
    shown = capsys.readouterr().out
    assert "[bench] c" in shown and "s: a part of 7" in shown
    assert "s:   in " in shown and " wait_for_nothing" in shown


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny model over gloo")
@pytest.mark.parametrize("engine", PACKAGED)
def test_rollout_benchmark_measures_and_tells_of_every_part(engine: str, tmp_path: Path) -> None:
    command, out = command_of(tmp_path, "tiny/tp1/tp2", engine)
    command += ["--world", "2", "--throughput", "--repeats", "2", "--steps", "2", "--interrupt"]
    done = subprocess.run([*command, "--cycles", "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not list(tmp_path.glob("*.partial*"))
    (case,) = json.loads(out.read_text())["cases"]
    ways = case["throughput"]["seconds"]
    assert ways.keys() == {"loop", "plain", "plain_without_logprobs"}
    assert all(len(taken) == 2 and min(taken) > 0 for taken in ways.values())
    assert case["throughput"]["loop_to_plain"] > 0 and case["throughput"]["tokens"] <= 8 * 12
    assert max(case["interrupted"].values()) < 1e-5 > case["mismatch_mean_worst"]
    assert case["cycles"]["number"] == 1
    made = {one.pop("of"): one for one in case["generations"]}
    assert [*made] == ["loop, warm-up", "loop, repeat 1", "loop, repeat 2", "step 1", "step 2"]
    for one in made.values():
        assert {len(of_ranks) for of_ranks in one.values()} == {2}
        assert min(one["python_ms"]) > 0 and min(one["cpu_s"]) > 0
    told = [line for line in done.stdout.splitlines() if line.startswith("[bench]")]
    order = ("starting", "weights verified", "loop, repeat 2", "step 2 generate", "cycle 1")
    found = [next(i for i, line in enumerate(told) if part in line) for part in order]
    assert found == sorted(found)


def command_of(tmp_path: Path, case: str, engine: str) -> tuple[list[str], Path]:
    """Returns a command of a tiny case, and the file that gets its result."""
    model: dict[str, Any] = {**TINY, "architectures": ["Qwen2ForCausalLM"]}
    (tmp_path / "qwen2.5-tiny.json").write_text(json.dumps(model))
    out = tmp_path / "times.json"
    command = [sys.executable, str(BENCHMARK), str(out), case, "--engine", engine]
    command += ["--models", str(tmp_path), "--prompts", "4", "--samples", "2"]
    command += ["--prompt-tokens", "8", "--new-tokens", "12", "--set", "model.dtype=float32"]
    return command, out
