"""Services that keep a run's metrics, samples, knobs and report: Weights & Biases, MLflow.

Only rank 0 has trackers. Each works in a thread of its own with a bounded queue: the loop never
waits for a service, except for CLOSE_S at the end of the run, for all services together. What a
service does not take in time or refuses is dropped, counted and said; the run's own files have
everything. Nothing here raises.
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

MAX_WAITING = 1000  # steps and samples that wait for a service
RETRY_S = 30.0  # between attempts to begin
CLOSE_S = 30.0  # for what waits at the end of the run
WANDB_ID, MLFLOW_ID = "wandb_id", "mlflow_id"  # files of the run folder: which run it is there


class Tracker(Protocol):
    """A service; its methods raise whatever the service's package does, and may block for long."""

    name: str

    def begin(self) -> None:
        """Begins the run there, or goes on with it."""
        ...

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Records a step's metrics."""
        ...

    def samples(self, step: int, rows: list[Row]) -> None:
        """Records some samples of a step as a table."""
        ...

    def end(self, report: Path, is_done: bool) -> None:
        """Keeps the report page and ends the run; whether it was trained to its last step."""
        ...


class Wandb:
    """Weights & Biases; where to and as whom say its own variables (WANDB_ENTITY, WANDB_MODE ...).

    Steps are a metric of their own (`step`): a run that continues from an older checkpoint records
    some again, and wandb's own counter never goes back.

    Args:
        project: that the run belongs to.
        folder: the run folder, with its config.yaml.
    """

    name = "wandb"

    def __init__(self, project: str, folder: Path) -> None:
        self._project, self._folder = project, folder
        self._run: Any = None

    def begin(self) -> None:
        """Begins the run there, or goes on with it."""
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
            # Neither rank 0's output nor its program is asked for.
            settings=wandb.Settings(console="off", save_code=False),
        )
        file.write_text(f"{self._run.id}\n", encoding="utf-8")
        self._run.define_metric("*", step_metric="step")

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Records a step's metrics."""
        self._run.log({**values, "step": step})

    def samples(self, step: int, rows: list[Row]) -> None:
        """Records some samples of a step as a table."""
        import wandb

        columns = column_names(rows)
        data = [[row.get(column) for column in columns] for row in rows]
        self._run.log({"samples": wandb.Table(columns=columns, data=data), "step": step})

    def end(self, report: Path, is_done: bool) -> None:
        """Keeps the report page and ends the run; whether it was trained to its last step."""
        import wandb

        artifact = wandb.Artifact(f"report-{self._run.id}", type="report")
        artifact.add_file(str(report))
        self._run.log_artifact(artifact)
        self._run.finish(exit_code=0 if is_done else 1)


class Mlflow:
    """MLflow; where to and as whom say its own variables (MLFLOW_TRACKING_URI ...).

    Args:
        experiment: that the run belongs to.
        folder: the run folder, with its config.yaml.
    """

    name = "mlflow"

    def __init__(self, experiment: str, folder: Path) -> None:
        self._experiment, self._folder = experiment, folder
        self._run: Any = None
        self._is_new = False  # it has no parameters yet

    def begin(self) -> None:
        """Begins the run there, or goes on with it."""
        import mlflow

        file = self._folder / MLFLOW_ID
        if self._run is None:  # else an attempt before has failed below, and the run is active
            known = file.read_text(encoding="utf-8").strip() if file.exists() else None
            mlflow.set_experiment(self._experiment)
            name = None if known else self._folder.name
            self._run = mlflow.start_run(run_id=known, run_name=name)
            self._is_new = known is None
        file.write_text(f"{self._run.info.run_id}\n", encoding="utf-8")
        if self._is_new:  # a parameter keeps its first value there
            mlflow.log_params(flat(written_config(self._folder)))
        mlflow.log_artifact(str(self._folder / "config.yaml"))

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Records a step's metrics."""
        import mlflow

        named = {re.sub(r"[^\w\-. /:]", "_", name): value for name, value in values.items()}
        mlflow.log_metrics(named, step=step)

    def samples(self, step: int, rows: list[Row]) -> None:
        """Records some samples of a step as a table."""
        import mlflow

        table = {column: [row.get(column) for row in rows] for column in column_names(rows)}
        mlflow.log_table(table, artifact_file=f"samples/step_{step:06d}.json")

    def end(self, report: Path, is_done: bool) -> None:
        """Keeps the report page and ends the run; whether it was trained to its last step."""
        import mlflow

        mlflow.log_artifact(str(report))
        mlflow.end_run(status="FINISHED" if is_done else "KILLED")


class TrackerSink:
    """Hands what a run records to a tracker, in a thread.

    Args:
        tracker: the service.
        folder: the run folder, whose report page is kept at the end.
        say: tells the user something; called in the thread that calls the methods.
        max_waiting: records that wait for the service at most.
        close_s: seconds that `close` waits at most, from `begin_close` on.

    Attributes:
        is_done: whether the run was trained to its last step; set before `close`.
        num_dropped: records that the service did not get.
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
        self._errors: list[str] = []  # that are to be said
        self._known: set[str] = set()  # kinds of errors that were said
        self._num_taken = self._num_given = 0
        self._waiting: queue.Queue[Callable[[], None]] = queue.Queue(max_waiting)
        self._closing, self._closes_at, self._is_closed = threading.Event(), 0.0, False
        self._thread = threading.Thread(target=self._work, name=tracker.name, daemon=True)
        self._thread.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records a step."""
        values = dict(metrics)
        self._put(lambda: self._tracker.metrics(step, values))

    def samples(self, step: int, file: Path) -> None:
        """Records the first samples of a dump.

        Args:
            step: whose they are.
            file: that RolloutDump wrote.
        """
        self._put(lambda: self._tracker.samples(step, first_samples(file)))

    def begin_close(self) -> None:
        """Lets the service end the run, while others do the same."""
        if not self._closing.is_set():
            self._closes_at = time.monotonic() + self._close_s
            self._closing.set()

    def close(self) -> None:
        """Waits until the service has everything, but not for long, and says what it lacks."""
        if self._is_closed:
            return
        self._is_closed = True
        self.begin_close()
        self._thread.join(max(0.0, self._closes_at - time.monotonic()))
        self._say_errors()
        lost = self._num_given - self._num_taken
        if lost:
            self.num_dropped = lost
            self._say(
                f"{self._tracker.name}: {lost} of {self._num_given} records were dropped; "
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
                self._say(f"{self._tracker.name}: does not keep up; records are dropped")

    def _say_errors(self) -> None:
        while self._errors:
            self._say(self._errors.pop(0))

    def _work(self) -> None:
        """Begins, takes records until the run closes, and ends."""
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
        """Whether it could be done; the first error of a kind is said."""
        try:
            act()
        # Whatever the package raises: the network's errors, its own, sys.exit without a key.
        except (Exception, SystemExit) as error:
            said = str(error).strip().splitlines()
            text = f"{self._tracker.name}: {what}: {type(error).__name__}"
            if what not in self._known:
                self._known.add(what)
                self._errors.append(f"{text}: {said[0]}" if said else text)
            return False
        return True
