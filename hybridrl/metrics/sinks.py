"""Outputs for a run's metrics and samples: metrics.jsonl, TensorBoard, console, log, rollouts/.

Only rank 0 has sinks. A run that resumes after step N first removes later steps from its files, so
that each step is recorded only once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from hybridrl.config.files import parse_json
from hybridrl.errors import UserError
from hybridrl.metrics.estimates import Estimate
from hybridrl.metrics.tables import (
    MAX_MARKDOWN_SAMPLES,
    column_names,
    first_samples,
    flat,
    markdown_table,
    written_config,
)
from hybridrl.metrics.values import ACCURACY, PHASES, Record

DAMAGED = ".damaged"  # suffix of the file that collects damaged lines


class MetricSink(Protocol):
    """Output that receives the metrics of each step, in order."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Records the metrics of a step."""

    def close(self) -> None:
        """Writes buffered records and closes files."""


class SampleSink(Protocol):
    """Output that receives the samples of some steps."""

    def samples(self, step: int, file: Path) -> None:
        """Records the first samples of a step from its file, which RolloutDump wrote."""


class JsonlSink:
    """Appends one JSON object per step to a file, and flushes it immediately.

    Records after the step from which a run resumes are removed. Damaged lines are moved to a second
    file, whose name ends in DAMAGED, and counted, except a last line that a crash cut short. Raises
    UserError if the path is not a file.
    """

    def __init__(self, path: Path, last_step: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.num_damaged = 0
        self._last: Record = {}
        self._last_bytes = 0
        if path.exists():
            records, damaged = read_lines(path)
            records = [r for r in records if _step(r) <= last_step]
            kept = [json.dumps(r) + "\n" for r in records]
            replacement = path.with_name(path.name + ".new")
            replacement.write_text("".join(kept), encoding="utf-8")
            if damaged:
                with path.with_name(path.name + DAMAGED).open("ab") as file:
                    file.writelines(line + b"\n" for line in damaged)
            os.replace(replacement, path)
            self.num_damaged = len(damaged)
            if kept:
                self._last, self._last_bytes = records[-1], len(kept[-1])
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends `{"step": step, ...}`, or extends a last line of the same step, because a run
        that was stopped before an evaluation runs it when it resumes. NaN and infinity become null.
        """
        is_same = self._last.get("step") == step
        record: Record = dict(self._last) if is_same else {"step": step}
        record.update(
            (name, value if math.isfinite(value) else None) for name, value in metrics.items()
        )
        line = json.dumps(record, allow_nan=False) + "\n"
        if is_same:
            self._file.truncate(os.fstat(self._file.fileno()).st_size - self._last_bytes)
        self._file.write(line)
        self._file.flush()
        self._last, self._last_bytes = record, len(line)  # the JSON text is ASCII

    def close(self) -> None:
        self._file.close()


class TensorBoardSink:
    """Writes TensorBoard events: metrics as scalars, samples and knobs as tables.

    Knobs are not written as TensorBoard's hyper-parameters, because `add_hparams` writes a second
    run folder, and a run that resumes with changed knobs would show only the first values. A text
    names the command for the HTML report, which TensorBoard cannot show. TensorBoard hides steps
    after `last_step`, at which the run resumes.
    """

    def __init__(self, folder: Path, last_step: int = 0) -> None:
        # Imported here, because importing TensorBoard takes a second and only rank 0 needs it.
        from torch.utils.tensorboard import SummaryWriter

        # Set purge_step even on the first start, because TensorBoard 2.21 treats the first purge
        # mark as the beginning of the run and hides no steps for this mark.
        events = str(folder / "tensorboard")
        self._writer = SummaryWriter(events, purge_step=last_step + 1, flush_secs=10)
        table = markdown_table(("knob", "value"), flat(written_config(folder)).items())
        self._writer.add_text("config", table, last_step)
        path = folder.resolve()
        page = f"`hybridrl report {path}` writes the report of this run, `{path / 'report.html'}`."
        self._writer.add_text("report", page, last_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def samples(self, step: int, file: Path) -> None:
        rows = [
            {name: value for name, value in row.items() if not isinstance(value, list)}
            for row in first_samples(file, MAX_MARKDOWN_SAMPLES)
        ]
        names = column_names(rows)
        table = markdown_table(names, ([row.get(name, "") for name in names] for row in rows))
        self._writer.add_text("samples", table, step)

    def close(self) -> None:
        self._writer.close()


class ConsoleSink:
    def __init__(self, num_steps: int, last_step: int = 0, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._num_steps = num_steps
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("train", total=num_steps, completed=last_step)
        self._progress.start()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.message(step_line(step, self._num_steps, metrics))
        self._progress.update(self._task, completed=step)

    def message(self, text: str) -> None:
        """Prints a line without markup, because it may contain phase names in brackets."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def compare(
        self, title: str, rows: Mapping[str, tuple[Estimate | None, Estimate | None]]
    ) -> None:
        table = Table("", "before", "after", title=title)
        for name, values in rows.items():
            table.add_row(name, *("-" if value is None else value.shown(3) for value in values))
        self._console.print(table)

    def close(self) -> None:
        self._progress.stop()


class LogSink:
    def __init__(self, path: Path, num_steps: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file, self._num_steps = path.open("a", encoding="utf-8"), num_steps

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.message(step_line(step, self._num_steps, metrics))

    def message(self, text: str) -> None:
        self._file.write(text + "\n")
        self._file.flush()  # flush now, because crash messages may follow in this file

    def close(self) -> None:
        self._file.close()


class RolloutDump:
    """Writes samples as JSONL files: step 1 and every `every`th step; 0 writes none."""

    def __init__(self, directory: Path, every: int) -> None:
        self._directory, self._every = directory, every

    def is_due(self, step: int) -> bool:
        return self._every > 0 and (step == 1 or step % self._every == 0)

    def file(self, step: int) -> Path:
        return self._directory / f"step_{step:06d}.jsonl"

    def write(self, step: int, samples: Iterable[Mapping[str, object]]) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self.file(step)
        partial = path.with_name(path.name + ".partial")
        # Half of a surrogate pair cannot be encoded in UTF-8, so it is written as a JSON escape.
        with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
            for sample in samples:
                file.write(json.dumps(dict(sample), ensure_ascii=False) + "\n")
        partial.replace(path)


def step_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    times = [
        f"[{label}] {seconds:.2f}s"
        for phase, label in PHASES.items()
        if (seconds := metrics.get(f"time_s/{phase}"))
    ]
    shown = {
        "reward": "reward/mean",
        "loss": "policy/loss",
        "kl": "policy/kl",
        "tokens": "response_tokens/mean",
        "accuracy": ACCURACY,
        **({} if ACCURACY in metrics else {"held-out reward": "eval/reward"}),
        "held-out loss": "eval/loss",
        "perplexity": "eval/perplexity",
        "held-out preference accuracy": "eval/preference/accuracy",
    }
    values = [f"{label} {metrics[key]:.3f}" for label, key in shown.items() if key in metrics]
    return " ".join((f"step {step:>{len(str(num_steps))}}/{num_steps}", *times, *values))


def read_records(path: Path) -> list[Record]:
    """Returns the records in a metrics.jsonl file, without damaged lines; see `read_lines`."""
    return read_lines(path)[0]


def read_lines(path: Path) -> tuple[list[Record], list[bytes]]:
    """Returns records and damaged lines, without a last one cut short. Raises UserError."""
    if not path.is_file():
        found = "a folder" if path.is_dir() else "not a file"
        raise UserError(str(path), found, "a metrics file", f"Move or delete {path}.")
    lines = path.read_bytes().split(b"\n")
    records, damaged = [], []
    for number, line in enumerate(lines):
        if (record := _record(line)) is not None:
            records.append(record)
        elif line.strip() and number < len(lines) - 1:
            damaged.append(line)
    return records, damaged


def _record(line: bytes) -> Record | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        return None
    return {k: v for k, v in found.items() if v is None or type(v) in (int, float)}


def _step(record: Record) -> int:
    return int(record["step"] or 0)
