"""The command `report`: what it asks of `plan`, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hybridrl.cli.report import planned_gib, report_runs
from hybridrl.config.load import load_config, to_yaml
from hybridrl.errors import UserError
from hybridrl.parallel.host_gpus import Host
from hybridrl.services.planner.plan_report import plan_report

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that 4 GPUs trained for a step."""
    monkeypatch.chdir(ROOT)  # paths of the example's config start there
    config = load_config(ROOT / "examples" / "quickstart" / "sft.yaml")
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "policy/loss": 1.0}\n')
    note(tmp_path, world_size=4, is_cpu=False)
    return tmp_path


def note(folder: Path, **start: object) -> None:
    (folder / "run.json").write_text(json.dumps({"starts": [{"world_size": 64}, start]}))


def test_planned_memory_is_that_of_plan_for_the_ranks_of_the_last_start(run: Path) -> None:
    said: list[str] = []
    config = load_config(run / "config.yaml")
    memory = plan_report(config, 4, host=Host(num_gpus=4))[0]["memory"]
    assert planned_gib(run, said.append) == {
        "training": memory["usual_train_peak_bytes"] / 2**30,
        "generation": memory["rollout_peak_bytes"] / 2**30,
    }
    report_runs([run], None, said.append, said.append)
    assert said == [str(run / "report.html")]
    assert '"levels":{"memory":{"training":' in (run / "report.html").read_text()


def test_processes_on_cpu_are_compared_with_no_plan(run: Path) -> None:
    note(run, world_size=4, is_cpu=True)
    assert planned_gib(run, pytest.fail) == {}
    (run / "run.json").unlink()
    assert planned_gib(run, pytest.fail) == {}


def test_a_plan_that_cannot_be_made_is_said(run: Path) -> None:
    said: list[str] = []
    note(run, world_size=3, is_cpu=False)  # of tp 2 and pp 2
    assert planned_gib(run, said.append) == {}
    assert len(said) == 1 and "is not shown" in said[0] and str(run) in said[0]


def test_more_runs_than_colours_are_refused(run: Path) -> None:
    with pytest.raises(UserError, match="at most 8 runs"):
        report_runs([run] * 9, None, pytest.fail, pytest.fail)
