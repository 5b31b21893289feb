"""`hybridrl bench rollout` as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import FRESH
from packaged import INSTALLED
from refusals import QUICKSTART, files_below, hybridrl, refuse

BENCH = ("bench", "rollout")
GRPO = (
    "examples/quickstart/grpo.yaml",
    *FRESH,
    "steps.prompts_per_step=6",
    "steps.samples_per_prompt=3",
    "data.max_prompt_tokens=8",
)
SIZES = {
    "world_size": 2,
    "tp": 1,
    "ep": 1,
    "prompts": 6,
    "samples_per_prompt": 3,
    "prompt_tokens": 8,
    "new_tokens": 12,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    shutil.copytree(QUICKSTART, folder / "examples" / "quickstart")
    return folder


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.slow
def test_bench_rollout_measures_every_installed_engine_and_leaves_nothing(folder: Path) -> None:
    before = files_below(folder)
    done = hybridrl(folder, *BENCH, *GRPO, "--world", "2", "--rounds", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert files_below(folder) == before
    assert done.stdout.count("\n") == 1
    report = json.loads(done.stdout)
    engines = report.pop("engines")
    assert report == SIZES
    assert [entry["engine"] for entry in engines] == ["hf", *INSTALLED]
    for entry in engines:
        assert entry["num_tokens"] == 6 * 3 * 12 and entry["replicas"] == 2
        slowest = max(entry["rounds_s"])
        assert len(entry["rounds_s"]) == 2 and 0 < slowest < entry["start_s"]
        fastest = min(entry["rounds_s"])
        assert 216 / slowest <= entry["tokens_per_s"] <= 216 / fastest
        assert 0 < entry["engine_bytes"] < entry["rank_bytes"]
    lines = done.stderr.splitlines()
    assert sum(" tokens/s, " in one for one in lines) == len(engines)
    assert not any("memory of this rank" in one for one in lines)
    for engine in ("hf", *INSTALLED):
        told = [one.split(maxsplit=1)[1] for one in lines if one.startswith(f"{engine} ")]
        parts = ("is starting", "engine agrees", "warm-up", "round 1 of 2", "round 2 of 2")
        assert [one for one in told if one.startswith(parts)] == told[:-1] and len(told) == 6


@pytest.mark.dist
def test_bench_rollout_ends_with_the_code_of_an_engine_that_fails(folder: Path) -> None:
    """A module that only ranks cannot import: one message, and no further engine is measured."""
    code = "import os\n\nreward = lambda *_: 0.0\nassert 'RANK' not in os.environ\n"
    (folder / "broken.py").write_text(code)
    knobs = ["reward.function=broken:reward", "reward.extract=null"]
    refuse(folder, [*BENCH, *GRPO, *knobs], "reward.function", "AssertionError")


@pytest.mark.full
def test_bench_rollout_refuses_what_it_cannot_measure(folder: Path) -> None:
    refuse(folder, [*BENCH, *GRPO, "--engines", "hf,tgi"], "--engines", "tgi", "vllm")
    refuse(folder, [*BENCH, *GRPO, "--engines", "scripted"], "--engines", "scripted")
    refuse(folder, [*BENCH, *GRPO, "rollout.tp=2", "--engines", "hf,vllm"], "rollout.tp")
    refuse(folder, [*BENCH, "examples/quickstart/sft.yaml"], "algorithm.name", "bench rollout")
    refuse(folder, [*BENCH, *GRPO, "rollout.top_q=1"], "rollout.top_q", "rollout.top_p")
