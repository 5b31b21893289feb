"""`hybridrl check --mismatch` as a user runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from command_line import FRESH, NO_EVALUATION
from refusals import QUICKSTART, hybridrl

GRPO = ("examples/quickstart/grpo.yaml", *FRESH, *NO_EVALUATION)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mismatch")
    shutil.copytree(QUICKSTART, folder / "examples" / "quickstart")
    return folder


@pytest.mark.dist
def test_check_mismatch_of_a_mixture_has_a_verdict_on_routing(folder: Path) -> None:
    """In float32 both sides choose alike, and the run need not replay; experts dealt to two."""
    moe = ["model.init=examples/quickstart/moe_model", "train.ep=2"]
    done = hybridrl(folder, "check", "--mismatch", *GRPO, *moe, "--world", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    routing = json.loads(done.stdout)["routing"]
    assert routing["agrees"] is True and "the run trains with its own" in routing["found"]
    numbers = routing["details"]
    assert max(numbers["diff_mean"], numbers["diff_mean_with_engines_experts"]) < numbers["bound"]


@pytest.mark.dist
def test_check_mismatch_of_a_run_that_replays_truncation_agrees(folder: Path) -> None:
    cut = ["rollout.top_p=0.5", "rollout.top_k=8", "algorithm.sampling_replay=rollout"]
    done = hybridrl(folder, "check", "--mismatch", *GRPO, *cut, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    sampling = json.loads(done.stdout)["sampling"]
    assert sampling["agrees"] is True and "could be drawn" in sampling["found"]
    assert sampling["details"]["num_sampled"] > 100
    assert sampling["details"]["diff_mean"] < 1e-4


@pytest.mark.dist
def test_check_mismatch_tells_people_what_differs_and_ends_with_code_1(folder: Path) -> None:
    done = hybridrl(folder, "check", "--mismatch", *GRPO, "rollout.top_p=0.5", "--reference")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr and "ended with code" not in done.stderr, done.stderr
    lines = done.stdout.splitlines()
    verdict = {
        name: next(line for line in lines if line.startswith(name))
        for name in ("weights", "tokens", "sampling", "numerics")
    }
    assert "DIFFER" in verdict.pop("sampling")
    assert all(" agree " in line for line in verdict.values())
    assert any("Set rollout.top_p=1" in line for line in lines)
    assert any(
        line.split()[1:] == ["difference", "trainer_error", "engine_error"] for line in lines
    )
    assert lines[-1] == "engine and trainer differ"
