"""The restart benchmark's own checks: a killed rank of a real run, and how costs are told apart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_bench_reshard import TINY

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny model over gloo")
def test_restart_benchmark_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    found, said = measured(tmp_path, "tiny/dp2/tp1", "--fewer")
    fewer = found["fewer"]
    assert fewer["ranks"] == 1 and fewer["lost_steps"] == 1, said
    assert 0 < fewer["replacement_lived_s"] < fewer["restart_s"]
    assert found["restart"]["restart_s"] > 0 and "fewer_restart_s" in found["is_met"]
    assert any("1 ranks go on" in text for _, text in fewer["output"]), fewer["output"]


def measured(tmp_path: Path, case: str, *options: str) -> tuple[dict[str, Any], str]:
    """Returns what the benchmark found of a tiny model, and what it said."""
    model, out = {**TINY, "architectures": ["Qwen2ForCausalLM"]}, tmp_path / "times.json"
    (tmp_path / "qwen2.5-tiny.json").write_text(json.dumps(model))
    command = [sys.executable, str(BENCHMARKS / "bench_restart.py"), case, *options]
    command += ["--out", str(out), "--models", str(tmp_path), "--folder", str(tmp_path)]
    command += ["--prompts", "8", "--samples", "4", "--prompt-tokens", "8"]
    command += ["--response-tokens", "24", "--micro-batch-tokens", "512"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = json.loads(out.read_text())
    assert "error" not in found, done.stdout + done.stderr
    assert done.returncode == int(not all(found["is_met"].values()))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"times.json", "qwen2.5-tiny.json"}
    return found, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny model over gloo")
def test_restart_benchmark_kills_a_rank_and_measures_what_follows(tmp_path: Path) -> None:
    found, _ = measured(tmp_path, "tiny/tp2/tp1")
    assert found["is_met"]["restart_s"] and found["is_met"]["lost_steps"]
    assert [bool(one["copy_s"]) for one in found["steps"]] == [n % 3 == 0 for n in range(1, 14)]
    assert found["restart"]["after_step"] == 12 and found["restart"]["lost_steps"] == 1
    assert len(found["copy"]["complete_after_s"]) == 4
    parts = found["restart"]["seconds_of_rank_0"]
    assert [next(iter(parts)), list(parts)[-1]] == ["imports", "first step"]
    assert parts["state"] > 0
    assert "state" not in found["restart"]["seconds_of_first_start"]
    assert found["copy"]["waits_s"] > 0 and found["copy"]["num_without"] >= 2
    assert found["checkpoint"]["stalls_s"] is not None
    said = [text for _, text in found["restart"]["output"]]
    assert any("step 12 was in host memory" in text for text in said), said


def step(number: int, step_s: float, **changed: Any) -> dict[str, Any]:
    kept = {
        "copy_s": 0.0,
        "complete_s": None,
        "gap_s": 0.1,
        "is_warm": number > 2,
        "has_checkpoint": False,
    }
    beside = {"is_beside_copy": False, "is_beside_checkpoint": False}
    return {"step": number, "step_s": step_s, **kept, **beside, **changed}


def test_costs_are_those_of_steps_beside_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from restart_case import costs

    steps = [
        step(1, 50.0),
        step(2, 11.0),
        step(3, 19.0, copy_s=9.0),
        step(4, 30.0, is_beside_copy=True),
        step(5, 10.0),
        step(6, 14.5, copy_s=0.5, complete_s=4.0, is_beside_checkpoint=True),
        step(7, 10.3, is_beside_copy=True),
        step(8, 10.0),
        step(9, 10.5, copy_s=0.5, complete_s=2.5),
        step(10, 10.1, is_beside_copy=True, has_checkpoint=True, gap_s=1.6),
        step(11, 10.0, gap_s=None),
    ]
    found = costs(steps, 3)
    assert found["copy"] == {
        "step_without_s": 10.0,
        "num_without": 5,
        "waits_s": 0.5,
        "first_waits_s": 9.0,
        "step_beside_is_longer_s": pytest.approx(0.2),
        "complete_after_s": [4.0, 2.5],
        "share_of_a_step": pytest.approx(0.07),
        "waits_share": pytest.approx(0.5 / 30, abs=1e-4),
        "share": pytest.approx(0.7 / 30, abs=1e-4),
        "auto_would_copy_every": 4,  # 1.25% of the time are waits
        "auto_waits_share": pytest.approx(0.5 / 40, abs=1e-4),
        "auto_share": pytest.approx(0.7 / 40, abs=1e-4),
    }
    assert found["checkpoint"]["stalls_s"] == 1.5
    with pytest.raises(RuntimeError, match="no copies"):
        costs([one | {"copy_s": 0.0} for one in steps], 3)
    with pytest.raises(RuntimeError, match="no checkpoint"):
        costs([one | {"has_checkpoint": False} for one in steps], 3)
