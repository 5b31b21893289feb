"""What the report's page says of a run: read from its folder, as plain JSON values.

Reads run folders and nothing else; imports no torch. What a run did not record is left out. Of
samples it takes what a page can carry, MOST_SAMPLES of evenly spread dumps.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config.files import RUN_FILE, parse_json
from hybridrl.errors import DataError
from hybridrl.metrics.sinks import read_records
from hybridrl.metrics.values import VALIDATION, Record

MOST_SAMPLES, MOST_DUMPS = 2000, 40
MOST_SAMPLE_BYTES = 12 << 20
"""Of all samples together, as they stand in their dumps."""
DIGITS = 6


@dataclass(frozen=True)
class RunData:
    """What the page says of one run.

    Args:
        label: what the run is called on the page.
        records: its metrics.
        config: its configuration as it was resolved, "" if it left none.
        starts: what it noted of each start (loop/journal.py), the oldest first.
        has_finished: whether it left a summary, as a run does that took its last step.
        samples: of its dumps, each with its step.
        dumps: how many dumps there are, shown or not.
        timelines: of traced steps, the spans of each rank's phases (loop/trace.py).
        planned_gib: the memory that `plan` expects, by phase.
    """

    label: str
    records: Sequence[Record]
    config: str = ""
    starts: Sequence[Mapping[str, Any]] = ()
    has_finished: bool = False
    samples: Sequence[Mapping[str, Any]] = ()
    dumps: int = 0
    timelines: Sequence[Mapping[str, Any]] = ()
    planned_gib: Mapping[str, float] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """The metrics that it recorded, with a finite value or without."""
        return {name for record in self.records for name in record} - {"step"}

    def as_json(self) -> dict[str, Any]:
        """Returns what the page draws of it."""
        steps = [int(record["step"] or 0) for record in self.records]
        return {
            "label": self.label,
            "steps": steps,
            "metrics": {name: column(self.records, name) for name in sorted(self.names)},
            "samples": list(self.samples),
            "dumps": self.dumps,
            "timelines": list(self.timelines),
            "levels": {"memory": dict(self.planned_gib)},
            "config": self.config,
        }


def read_run(folder: Path, label: str, planned_gib: Mapping[str, float] | None = None) -> RunData:
    """Reads a run folder.

    Args:
        folder: a run's.
        label: what the page calls it.
        planned_gib: as of RunData; None: not known.

    Raises:
        DataError: the folder holds no metrics.
    """
    metrics = folder / "metrics.jsonl"
    records = read_records(metrics) if os.path.exists(metrics) else []
    if not records:
        raise DataError(
            str(metrics),
            "no steps" if os.path.exists(metrics) else "no such file",
            "the metrics of at least one step",
            "Give the folder of a run that has started, e.g. runs/quickstart-grpo.",
        )
    summary = _object(folder / "summary.json")
    before = _measured_before(summary)  # which has no other record
    if before and all(record["step"] for record in records):
        records.insert(0, {"step": 0, **before})
    config = folder / "config.yaml"
    starts = _object(folder / RUN_FILE).get("starts")
    samples, dumps = _samples(folder / "rollouts")
    return RunData(
        label,
        records,
        config.read_text(encoding="utf-8") if config.exists() else "",
        [one for one in starts if isinstance(one, dict)] if isinstance(starts, list) else [],
        bool(summary),
        samples,
        dumps,
        [one for path in sorted(folder.glob("traces/*.phases.json")) if (one := _object(path))],
        planned_gib or {},
    )


def _measured_before(summary: Mapping[str, Any]) -> Record:
    """Returns what was measured before the first step, with standard errors, as metrics."""
    parts = ((key.partition("_before"), value) for key, value in summary.items())
    return {
        _metric(name) + ending: value
        for (name, before, ending), value in parts
        if before and (value is None or type(value) in (int, float))
    }


def _metric(name: str) -> str:
    """Returns the metric that a name in a summary is of."""
    if name == "eval_reward":
        return "eval/reward"
    return f"eval/{name.removeprefix(VALIDATION)}"


def points(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """Returns (step, value) of every record that has the metric; NaN where it is not finite."""
    values = [(int(r["step"] or 0), r[name]) for r in records if name in r]
    return [
        (step, float(value) if value is not None and math.isfinite(value) else math.nan)
        for step, value in values
    ]


def column(records: Sequence[Record], name: str) -> dict[str, list[Any]]:
    """Returns the values of a metric, `v`, with DIGITS digits, None where one is not finite; and
    `at`, the records that have it, if some have not.
    """
    at = [number for number, record in enumerate(records) if name in record]
    found: dict[str, list[Any]] = {"v": [_short(records[number][name]) for number in at]}
    return found if len(at) == len(records) else {**found, "at": at}


def _short(value: float | int | None) -> float | int | None:
    if value is None or not math.isfinite(value):
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file; an empty one if it is damaged or none: the page goes
    without it.
    """
    try:
        found = parse_json(path.read_bytes())
    except (ValueError, OSError):
        return {}
    return _plain(found) if isinstance(found, dict) else {}


def _plain(value: Any) -> Any:
    """Returns a value of JSON with None for numbers that are not finite, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _samples(directory: Path) -> tuple[list[dict[str, Any]], int]:
    """Returns samples of at most MOST_DUMPS dumps, evenly spread from the first to the newest, the
    same number of each; and how many dumps there are.
    """
    dumps = sorted(directory.glob("step_*.jsonl"))
    chosen = evenly(dumps, MOST_DUMPS)
    samples: list[dict[str, Any]] = []
    for dump in chosen:
        step = int(digits) if (digits := dump.stem.removeprefix("step_")).isdecimal() else 0
        room = MOST_SAMPLE_BYTES // len(chosen)
        most = MOST_SAMPLES // len(chosen)
        samples += [{**one, "step": step} for one in _first_samples(dump, most, room)]
    return samples, len(dumps)


def _first_samples(dump: Path, most: int, room: int) -> Iterator[dict[str, Any]]:
    with dump.open("rb") as lines:
        for line in lines:
            if not most or (room := room - len(line)) < 0:
                return
            try:
                sample = parse_json(line, allows_half_pairs=True)
            except ValueError:  # the run is still writing it, or was killed
                continue
            if isinstance(sample, dict):
                most -= 1
                yield _plain(sample)


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Returns at most so many of the items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(i * last / (most - 1))] for i in range(most)]
