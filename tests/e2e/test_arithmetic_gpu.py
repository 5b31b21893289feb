"""examples/arithmetic_gpu, reduced to what a CPU can do: the data is right, and run.sh runs."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hybridrl.config.load import load_config

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic_gpu"
PARTS = ("sft", "grpo", "ppo")


def make_data() -> Any:
    spec = importlib.util.spec_from_file_location("arithmetic_data", EXAMPLE / "make_data.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sums_are_right_and_fit_the_configurations() -> None:
    module, draw = make_data(), random.Random(5)
    configs = [load_config(EXAMPLE / f"{part}.yaml") for part in PARTS]
    (extract,) = {config.reward.extract for config in configs}
    assert extract is not None
    longest_prompt = longest_response = 0
    for _ in range(5000):
        drawn = module.draw_sum(draw)
        work, _, answer = drawn.response.partition("=")
        terms = [int(term) for term in drawn.prompt.removesuffix("=").split("+")]
        results = list(itertools.accumulate(terms))
        steps = [re.fullmatch(r"(\d\d)(\d\d)", work[at : at + 4]) for at in range(0, len(work), 4)]
        assert len(steps) == len(terms) - 1 == module.NUM_STEPS
        for step, before, term, after in zip(steps, results, terms[1:], results[1:], strict=False):
            assert step is not None
            units, tens = map(int, step.groups())
            assert units == before % 10 + term % 10 and 10 * tens + units % 10 == after
        assert answer == drawn.answer == f"{results[-1]:03d}"
        found = re.search(extract, drawn.response)
        assert found is not None and found[1] == drawn.answer
        longest_prompt = max(longest_prompt, len(drawn.prompt))
        longest_response = max(longest_response, len(drawn.response))
    assert {config.data.max_prompt_tokens for config in configs} == {longest_prompt}
    # One more, for the end token.
    assert {config.rollout.max_new_tokens for config in configs} == {longest_response + 1}


@pytest.mark.full
@pytest.mark.slow
def test_run_sh_does_all_parts_and_says_that_nothing_was_learned(tmp_path: Path) -> None:
    data = [sys.executable, str(EXAMPLE / "make_data.py"), "runs/arithmetic"]
    data += ["--hidden-size", "64", "--layers", "2"]
    subprocess.run(data, cwd=tmp_path, check=True)
    for name in ("sft", "train"):
        file = tmp_path / "runs" / "arithmetic" / f"{name}.jsonl"
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:500]))
    knobs = "rollout.engine=hf rollout.eager=false steps.num_steps=10 data.eval_limit=8"
    knobs += " steps.prompts_per_step=16 steps.eval_every=5 log.tensorboard=false"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KNOBS": knobs}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    command = [str(EXAMPLE / "run.sh"), "out", "1"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr  # nothing is learned in 10 steps
    result = json.loads((tmp_path / "out" / "result_1gpu.json").read_text())
    assert result["has_learned"] is False and tuple(result["runs"]) == PARTS
    for part, run in result["runs"].items():
        assert run["steps"] == 10 and run["accuracy_by_step"].keys() == {"5", "10"}
        folder = tmp_path / "out" / f"arithmetic-{part}-1gpu"
        assert "Throughput" in (folder / "report.html").read_text()
        assert len(run["reward_by_step"]) == (0 if part == "sft" else 10)
    assert (tmp_path / "out" / "arithmetic-grpo-and-ppo-1gpu.html").is_file()
    assert (tmp_path / "out" / "result_1gpu.png").read_bytes().startswith(b"\x89PNG")
