"""Services that keep a run's metrics, against small modules with the packages' call signatures.

The signatures are those of wandb 0.31 and mlflow 3.17.
"""

from __future__ import annotations

import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hybridrl.metrics import trackers
from hybridrl.metrics.sinks import JsonlSink, RolloutDump
from hybridrl.metrics.tables import MAX_SAMPLES
from hybridrl.metrics.trackers import Mlflow, Tracker, TrackerSink, Wandb

Calls = list[tuple[str, Any]]


def stub_wandb(calls: Calls) -> types.ModuleType:
    """A module that notes what it is asked for."""
    module: Any = types.ModuleType("wandb")

    class Run:
        id = "r1"

        def define_metric(self, name: str, step_metric: str | None = None) -> None:
            calls.append(("define", (name, step_metric)))

        def log(self, data: dict[str, Any], step: int | None = None) -> None:
            calls.append(("log", data))

        def log_artifact(self, artifact_or_path: Any, name: str | None = None) -> None:
            calls.append(("artifact", (artifact_or_path.name, artifact_or_path.files)))

        def finish(self, exit_code: int | None = None) -> None:
            calls.append(("finish", exit_code))

    class Table:
        def __init__(self, columns: list[str], data: list[list[Any]]) -> None:
            self.columns, self.data = columns, data

    class Artifact:
        def __init__(self, name: str, type: str) -> None:
            self.name, self.files = name, list[str]()

        def add_file(self, local_path: str, name: str | None = None) -> None:
            assert Path(local_path).exists()
            self.files.append(Path(local_path).name)

    def init(
        project: str | None = None,
        name: str | None = None,
        id: str | None = None,
        resume: str | None = None,
        dir: str | None = None,
        config: dict[str, Any] | None = None,
        settings: Any = None,
    ) -> Run:
        calls.append(("init", (project, name, id, resume, config)))
        return Run()

    module.Table, module.Artifact, module.init = Table, Artifact, init
    module.Settings = lambda console, save_code: (console, save_code)
    return module  # type: ignore[no-any-return]


def stub_mlflow(calls: Calls) -> types.ModuleType:
    """A module that notes what it is asked for."""
    module: Any = types.ModuleType("mlflow")

    def start_run(run_id: str | None = None, run_name: str | None = None) -> Any:
        calls.append(("start", (run_id, run_name)))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "m1"))

    def log_artifact(local_path: str, artifact_path: str | None = None) -> None:
        assert Path(local_path).exists()
        calls.append(("artifact", Path(local_path).name))

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        calls.append(("metrics", (step, metrics)))

    def log_table(data: dict[str, list[Any]], artifact_file: str) -> None:
        calls.append(("table", (artifact_file, data)))

    module.start_run, module.log_artifact = start_run, log_artifact
    module.log_metrics, module.log_table = log_metrics, log_table
    module.set_experiment = lambda experiment_name: calls.append(("experiment", experiment_name))
    module.log_params = lambda params: calls.append(("params", params))
    module.end_run = lambda status="FINISHED": calls.append(("end", status))
    return module  # type: ignore[no-any-return]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder with what a report is made of."""
    (tmp_path / "config.yaml").write_text("run: {name: a}\ntrain: {tp: 2}\n")
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, {"reward/mean": 0.5})
    sink.close()
    return tmp_path


def dumped(folder: Path, step: int, num_samples: int) -> Path:
    dump = RolloutDump(folder / "rollouts", every=1)
    dump.write(step, [{"prompt": f"p{i}", "reward": float(i)} for i in range(num_samples)])
    return dump.file(step)


def record(sink: TrackerSink, folder: Path) -> None:
    sink.write(1, {"reward/mean": 0.5, "odd|name": 1.0})
    sink.samples(1, dumped(folder, 1, MAX_SAMPLES + 5))
    sink.is_done = True
    sink.close()


def test_wandb_gets_metrics_samples_knobs_and_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "wandb", stub_wandb(calls))
    said: list[str] = []
    for _ in range(2):  # the second start goes on with the same run
        record(TrackerSink(Wandb("p", folder), folder, said.append), folder)
    first, second = calls[:6], calls[6:]
    knobs = {"run": {"name": "a"}, "train": {"tp": 2}}
    assert first[0] == ("init", ("p", folder.name, None, "allow", knobs))
    assert second[0] == ("init", ("p", folder.name, "r1", "allow", knobs))
    assert first[1] == ("define", ("*", "step"))
    assert first[2] == ("log", {"reward/mean": 0.5, "odd|name": 1.0, "step": 1})
    table = first[3][1]["samples"]
    assert table.columns == ["prompt", "reward"] and len(table.data) == MAX_SAMPLES
    assert table.data[3] == ["p3", 3.0]
    assert first[4:] == [("artifact", ("report-r1", ["report.html"])), ("finish", 0)]
    assert said == []


def test_mlflow_gets_metrics_samples_knobs_and_the_report(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Calls = []
    monkeypatch.setitem(sys.modules, "mlflow", stub_mlflow(calls))
    said: list[str] = []
    for _ in range(2):
        record(TrackerSink(Mlflow("e", folder), folder, said.append), folder)
    params = ("params", {"run.name": "a", "train.tp": 2})
    assert calls[:4] == [
        ("experiment", "e"),
        ("start", (None, folder.name)),
        params,
        ("artifact", "config.yaml"),
    ]
    assert calls[4] == ("metrics", (1, {"reward/mean": 0.5, "odd_name": 1.0}))
    file, table = calls[5][1]
    assert file == "samples/step_000001.json" and table["prompt"][3] == "p3"
    assert calls[6:8] == [("artifact", "report.html"), ("end", "FINISHED")]
    assert calls[9] == ("start", ("m1", None)) and calls.count(params) == 1
    assert said == []


class Slow:
    """A service that answers nothing until it is let go, or fails."""

    name = "slow"

    def __init__(self, act: Callable[[str], None]) -> None:
        self._act, self.steps = act, list[int]()
        self.ends: list[bool] = []

    def begin(self) -> None:
        self._act("begin")

    def metrics(self, step: int, values: Any) -> None:
        self._act("metrics")
        self.steps.append(step)

    def samples(self, step: int, rows: Any) -> None:
        self._act("samples")

    def end(self, report: Path, is_done: bool) -> None:
        self._act("end")
        self.ends.append(is_done)


def test_a_service_that_hangs_holds_nobody_up_and_what_is_dropped_is_counted(
    folder: Path,
) -> None:
    gate, said = threading.Event(), list[str]()
    tracker: Tracker = Slow(lambda what: None if gate.wait(60) else None)
    sink = TrackerSink(tracker, folder, said.append, max_waiting=4, close_s=0.2)
    start = time.monotonic()
    for step in range(1, 11):
        sink.write(step, {"loss": 1.0})
    assert sink.num_dropped == 6
    sink.close()
    assert time.monotonic() - start < 30  # and not the minute of the service
    assert said[0] == "slow: the service does not keep up, so records are dropped"
    assert said[1].startswith("slow: 10 of 10 records were dropped") and len(said) == 2
    gate.set()


def test_a_service_that_refuses_is_said_once_and_counted(folder: Path) -> None:
    def act(what: str) -> None:
        if what == "metrics":
            raise ConnectionError("no route to host\nand more")

    said: list[str] = []
    tracker = Slow(act)
    sink = TrackerSink(tracker, folder, said.append)
    for step in range(3):
        sink.write(step, {})
    sink.close()
    assert said[0] == "slow: refused a record: ConnectionError: no route to host"
    assert said[1].startswith("slow: 3 of 3 records were dropped") and len(said) == 2
    assert tracker.ends == [False]


def no_network(*given: Any, **named: Any) -> Any:
    raise ConnectionError("no route to host")


@pytest.mark.parametrize(
    "call",
    [
        *(f"wandb.{name}" for name in ("init", "define_metric", "log", "log_artifact", "finish")),
        *(f"mlflow.{name}" for name in ("set_experiment", "start_run", "log_params", "end_run")),
        *(f"mlflow.log_{what}" for what in ("metrics", "table", "artifact")),
    ],
)
def test_no_call_of_a_package_that_fails_is_raised(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    package, _, name = call.partition(".")
    calls: Calls = []
    module: Any = {"wandb": stub_wandb, "mlflow": stub_mlflow}[package](calls)
    if hasattr(module, name):
        setattr(module, name, no_network)
    else:  # of the run that wandb.init returns
        run = module.init()
        setattr(run, name, no_network)
        module.init = lambda **named: run
    monkeypatch.setitem(sys.modules, package, module)
    service = Wandb("p", folder) if package == "wandb" else Mlflow("e", folder)
    said: list[str] = []
    sink = TrackerSink(service, folder, said.append)
    begun = time.monotonic()
    record(sink, folder)
    assert time.monotonic() - begun < trackers.RETRY_S
    assert "ConnectionError: no route to host" in said[0]
    is_known_to_all = name in ("finish", "end_run") or call == "wandb.log_artifact"
    assert (sink.num_dropped == 0) == is_known_to_all == (len(said) == 1)


def test_mlflow_begins_once_where_parameters_are_refused_at_first(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "RETRY_S", 0.01)
    calls: Calls = []
    module: Any = stub_mlflow(calls)
    start_run, log_params, attempts = module.start_run, module.log_params, list[int]()

    def start_once(**named: Any) -> Any:
        if any(name == "start" for name, _ in calls):
            raise Exception("Run with UUID m1 is already active")  # as mlflow does
        return start_run(**named)

    def refuse_once(params: dict[str, Any]) -> None:
        attempts.append(1)
        (no_network if len(attempts) == 1 else log_params)(params)

    module.start_run, module.log_params = start_once, refuse_once
    monkeypatch.setitem(sys.modules, "mlflow", module)
    said: list[str] = []
    sink = TrackerSink(Mlflow("e", folder), folder, said.append)
    sink.write(1, {"loss": 1.0})
    deadline = time.monotonic() + 30
    while "metrics" not in dict(calls) and time.monotonic() < deadline:
        time.sleep(0.01)
    sink.close()
    assert said == ["mlflow: cannot begin: ConnectionError: no route to host"]
    names = [name for name, _ in calls]
    assert names.count("params") == 1 and names.index("params") < names.index("metrics")
    assert sink.num_dropped == 0
