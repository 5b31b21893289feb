"""Sends a run's metrics, samples, knobs and report to Weights & Biases and MLflow, on rank 0.

Each tracker runs in its own thread with a bounded queue. The training loop waits for services only
at the end of the run, for at most CLOSE_S seconds in total. Records that a service refuses or does
not accept in time are dropped, counted and reported; the run folder still contains all records. No
error of a service ends a run.
"""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from hybridrl.metrics.tables import Row, column_names, first_samples, flat, written_config

MAX_WAITING = 1000  # Maximum number of records in a service's queue.
RETRY_S = 30.0  # Seconds between attempts to start the run in the service.
CLOSE_S = 30.0  # Seconds to send queued records at the end of the run.
WANDB_ID, MLFLOW_ID = "wandb_id", "mlflow_id"  # Files with the run's id in the service.


class Tracker(Protocol):
    """A tracking service. Methods may block, and may raise any error of the service's package."""

    name: str

    def begin(self) -> None:
        """Starts the run in the service, or resumes it."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Records the metrics of a step."""

    def samples(self, step: int, rows: list[Row]) -> None:
        """Records samples of a step as a table."""

    def end(self, report: Path, is_done: bool) -> None:
        """Uploads the report page and ends the run. `is_done` is true after the last step."""


class Wandb:
    """Tracker for Weights & Biases, whose environment variables (WANDB_ENTITY ...) apply.

    The step is a separate metric (`step`), because wandb's own counter cannot decrease, and a run
    that resumes from an older checkpoint records some steps again.
    """

    name = "wandb"

    def __init__(self, project: str, folder: Path) -> None:
        self._project, self._folder = project, folder
        self._run: Any = None

    def begin(self) -> None:
        import wandb

        file = self._folder / WANDB_ID
        known = file.read_text(encoding="utf-8").strip() if file.exists() else None
        self._run = wandb.init(
            project=self._project,
            name=self._folder.name,
            id=known,
            resume="allow",
            dir=str(self._folder),
            config=written_config(self._folder),
            # Do not upload rank 0's console output or source code.
            settings=wandb.Settings(console="off", save_code=False),
        )
        file.write_text(f"{self._run.id}\n", encoding="utf-8")
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "step": step})

    def samples(self, step: int, rows: list[Row]) -> None:
        import wandb

        columns = column_names(rows)
        data = [[row.get(column) for column in columns] for row in rows]
        self._run.log({"samples": wandb.Table(columns=columns, data=data), "step": step})

    def end(self, report: Path, is_done: bool) -> None:
        import wandb

        artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(report))
        self._run.log_artifact(artifact)
        self._run.finish(exit_code=0 if is_done else 1)


class Mlflow:
    """Tracker for MLflow, whose environment variables (MLFLOW_TRACKING_URI ...) apply."""

    name = "mlflow"

    def __init__(self, experiment: str, folder: Path) -> None:
        self._experiment, self._folder = experiment, folder
        self._run: Any = None
        self._is_new = False  # whether the run in MLflow has no parameters yet

    def begin(self) -> None:
        import mlflow

        file = self._folder / MLFLOW_ID
        if self._run is None:  # else an earlier attempt started the run, but failed later
            known = file.read_text(encoding="utf-8").strip() if file.exists() else None
            mlflow.set_experiment(self._experiment)
            name = None if known else self._folder.name
            self._run = mlflow.start_run(run_id=known, run_name=name)
            self._is_new = known is None
        file.write_text(f"{self._run.info.run_id}\n", encoding="utf-8")
        if self._is_new:  # MLflow rejects changes of parameters, so write them only once
            mlflow.log_params(flat(written_config(self._folder)))
        mlflow.log_artifact(str(self._folder / "config.yaml"))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        import mlflow

        named = {re.sub(r"[^\w\-. /:]", "_", name): value for name, value in values.items()}
        mlflow.log_metrics(named, step=step)

    def samples(self, step: int, rows: list[Row]) -> None:
        import mlflow

        table = {column: [row.get(column) for row in rows] for column in column_names(rows)}
        mlflow.log_table(table, artifact_file=f"samples/step_{step:06d}.json")

    def end(self, report: Path, is_done: bool) -> None:
        import mlflow

        mlflow.log_artifact(str(report))
        mlflow.end_run(status="FINISHED" if is_done else "KILLED")


class TrackerSink:
    """Passes a run's records to a tracker that runs in its own thread.

    Args:
        folder: Run folder, whose report page is uploaded at the end.
        close_s: Maximum number of seconds that `close` waits, counted from `begin_close`.

    Attributes:
        is_done: Whether the run reached its last step; must be set before `close`.
    """

    def __init__(
        self,
        tracker: Tracker,
        folder: Path,
        say: Callable[[str], None],
        max_waiting: int = MAX_WAITING,
        close_s: float = CLOSE_S,
    ) -> None:
        self._tracker, self._folder, self._say = tracker, folder, say
        self._close_s = close_s
        self.is_done, self.num_dropped = False, 0
        self._errors: list[str] = []  # Errors that were not reported yet.
        self._known: set[str] = set()  # Kinds of errors that were reported.
        self._num_taken = self._num_given = 0
        self._waiting: queue.Queue[Callable[[], None]] = queue.Queue(max_waiting)
        self._closing, self._closes_at, self._is_closed = threading.Event(), 0.0, False
        self._thread = threading.Thread(target=self._work, name=tracker.name, daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = dict(metrics)
        self._put(lambda: self._tracker.metrics(step, values))

    def samples(self, step: int, file: Path) -> None:
        self._put(lambda: self._tracker.samples(step, first_samples(file)))

    def begin_close(self) -> None:
        """Tells the service to end the run; called for all trackers first, which end together."""
        if not self._closing.is_set():
            self._closes_at = time.monotonic() + self._close_s
            self._closing.set()

    def close(self) -> None:
        """Waits, for a limited time, until the service has all records; reports dropped ones."""
        if self._is_closed:
            return
        self._is_closed = True
        self.begin_close()
        self._thread.join(max(0.0, self._closes_at - time.monotonic()))
        self._say_errors()
        if dropped := self._num_given - self._num_taken:
            self.num_dropped = dropped
            self._say(
                f"{self._tracker.name}: {dropped} of {self._num_given} records were dropped; "
                f"{self._folder} has all of them"
            )

    def _put(self, record: Callable[[], None]) -> None:
        self._say_errors()
        self._num_given += 1
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                name = self._tracker.name
                self._say(f"{name}: the service does not keep up, so records are dropped")

    def _say_errors(self) -> None:
        while self._errors:
            self._say(self._errors.pop(0))

    def _work(self) -> None:
        while not self._try("cannot begin", self._tracker.begin):
            if self._closing.wait(RETRY_S):
                return
        while not (self._closing.is_set() and self._waiting.empty()):
            try:
                record = self._waiting.get(timeout=0.1)
            except queue.Empty:
                continue
            self._num_taken += self._try("refused a record", record)
        self._try("cannot end", self._end)

    def _end(self) -> None:
        from hybridrl.services.report.html_page import write_report

        self._tracker.end(write_report(self._folder), self.is_done)

    def _try(self, what: str, act: Callable[[], None]) -> bool:
        try:
            act()
        # A tracker's package may raise anything, or call sys.exit if the API key is missing.
        except (Exception, SystemExit) as error:
            lines = str(error).strip().splitlines()
            text = f"{self._tracker.name}: {what}: {type(error).__name__}"
            if what not in self._known:
                self._known.add(what)
                self._errors.append(f"{text}: {lines[0]}" if lines else text)
            return False
        return True
