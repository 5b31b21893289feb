"""Reads the data that the report page shows about a run, as plain JSON values."""

from __future__ import annotations

import base64
import math
import os
import re
import stat
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
"""Maximum total size of all samples, measured as stored in the dumps."""
MOST_IMAGE_BYTES = 12 << 20
"""Maximum total size of the images of all samples."""
_IMAGE_NAME = re.compile(r"[0-9a-f]{8,64}")
DIGITS = 6


@dataclass(frozen=True)
class RunData:
    """Data about one run for the page.

    Args:
        config: The resolved configuration as YAML; "" if the run folder has none.
        starts: Records of the run's starts (loop/journal.py), the oldest first.
        has_finished: Whether the run folder has a summary, which is written after the last step.
        images: Small copies of the samples' images as data URIs, by name.
        dumps: Total number of dumps, including those that are not shown.
        timelines: Phases of each rank in traced steps (loop/trace.py).
    """

    label: str
    records: Sequence[Record]
    config: str = ""
    starts: Sequence[Mapping[str, Any]] = ()
    has_finished: bool = False
    samples: Sequence[Mapping[str, Any]] = ()
    images: Mapping[str, str] = field(default_factory=dict)
    dumps: int = 0
    timelines: Sequence[Mapping[str, Any]] = ()
    planned_gib: Mapping[str, float] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Names of all metrics that the run recorded, even if no value is finite."""
        return {name for record in self.records for name in record} - {"step"}

    def as_json(self) -> dict[str, Any]:
        steps = [int(record["step"] or 0) for record in self.records]
        return {
            "label": self.label,
            "steps": steps,
            "metrics": {name: column(self.records, name) for name in sorted(self.names)},
            "samples": list(self.samples),
            "images": dict(self.images),
            "dumps": self.dumps,
            "timelines": list(self.timelines),
            "levels": {"memory": dict(self.planned_gib)},
            "config": self.config,
        }


def read_run(folder: Path, label: str, planned_gib: Mapping[str, float] | None = None) -> RunData:
    """Reads a run folder; DataError if it contains no metrics."""
    metrics = folder / "metrics.jsonl"
    records = read_records(metrics) if os.path.exists(metrics) else []
    if not records:
        found = "no steps" if os.path.exists(metrics) else "no such file"
        remedy = "Pass the folder of a run that has completed a step, e.g. runs/quickstart-grpo."
        raise DataError(str(metrics), found, "the metrics of at least one step", remedy)
    summary = _object(folder / "summary.json")
    before = _measured_before(summary)  # there is no other record of step 0
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
        _images(folder / "rollouts" / "images", samples),
        dumps,
        [one for path in sorted(folder.glob("traces/*.phases.json")) if (one := _object(path))],
        planned_gib or {},
    )


def _measured_before(summary: Mapping[str, Any]) -> Record:
    renamed = {"eval_reward": "reward"}
    parts = ((key.partition("_before"), value) for key, value in summary.items())
    return {
        f"eval/{renamed.get(name, name.removeprefix(VALIDATION))}{ending}": value
        for (name, before, ending), value in parts
        if before and (value is None or type(value) in (int, float))
    }


def points(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    """Returns (step, value) of each record that has the metric; NaN for non-finite values."""
    values = [(int(r["step"] or 0), r[name]) for r in records if name in r]
    return [
        (step, float(value) if value is not None and math.isfinite(value) else math.nan)
        for step, value in values
    ]


def column(records: Sequence[Record], name: str) -> dict[str, list[Any]]:
    """Returns a metric's values as `v`, rounded to DIGITS digits; None for non-finite values.

    If some records lack the metric, `at` contains the indices of the records that have it.
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
    """Returns the JSON object in a file, or an empty object if the file is missing or damaged."""
    try:
        found = parse_json(path.read_bytes())
    except (ValueError, OSError):
        return {}
    return _plain(found) if isinstance(found, dict) else {}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _samples(directory: Path) -> tuple[list[dict[str, Any]], int]:
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
            except ValueError:  # the run is still writing this line, or was killed while writing it
                continue
            if isinstance(sample, dict):
                most -= 1
                yield _plain(sample)


def _images(folder: Path, samples: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Returns images; each dump, newest first, may use an equal share of the remaining bytes."""
    found: dict[str, str] = {}
    room, dumps = MOST_IMAGE_BYTES, _names_by_step(samples)
    for number, step in enumerate(sorted(dumps, reverse=True)):
        share = room // (len(dumps) - number)
        for name in dumps[step]:
            if name in found:
                continue
            data = _read_small(folder / f"{name}.jpg", share)
            if data is None:
                continue
            share, room = share - len(data), room - len(data)
            found[name] = f"data:image/jpeg;base64,{base64.b64encode(data).decode('ascii')}"
    return found


def _names_by_step(samples: Sequence[Mapping[str, Any]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for sample in samples:
        for key in ("images", "response_images"):
            names = sample.get(key)
            for name in names if isinstance(names, list) else ():
                if isinstance(name, str) and _IMAGE_NAME.fullmatch(name):
                    found.setdefault(sample["step"], []).append(name)
    return found


def _read_small(file: Path, most: int) -> bytes | None:
    """Returns a file's content; None if it is longer than `most` bytes or not a regular file."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            return None
        with file.open("rb") as opened:
            data = opened.read(most + 1)
    except OSError:
        return None
    return data if len(data) <= most else None


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Returns at most `most` evenly spaced items, including the first and the last."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(i * last / (most - 1))] for i in range(most)]
