"""One HTML page about a run, or about two beside each other: curves, configuration and sample
rollouts, in one file without links or scripts.

Reads run folders and nothing else; imports no torch. What a run did not record is left out. Texts
of rollouts are strangers' texts: they are escaped, and figures are images, which run nothing.
"""

from __future__ import annotations

import base64
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.files import parse_json
from hybridrl.config.yaml_text import parse_yaml
from hybridrl.errors import DataError
from hybridrl.metrics.plots import figures, points
from hybridrl.metrics.sinks import read_records
from hybridrl.metrics.values import ACCURACY, SKIPPED, STDERR, Record, recent_mean

NUM_SAMPLES = 20
ABSENT = "–"

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
      content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(26rem, 100%), 1fr));
         gap: 1rem; }
.plots img { width: 100%; }
.plots img.wide { grid-column: 1 / -1; }
table { border-collapse: collapse; font-size: 13px; }
td, th { border: 1px solid #ccc; padding: .2rem .6rem; text-align: left; vertical-align: top; }
td { unicode-bidi: isolate; }
pre, td { white-space: pre-wrap; overflow-wrap: anywhere; }
.samples td { font-family: ui-monospace, monospace; }
td.long { min-width: 18rem; }
td > div { max-height: 20rem; overflow: auto; }
summary { font-size: 1.5em; font-weight: bold; margin: .83em 0; cursor: pointer; }
pre { background: #f5f5f5; padding: 1rem; font-size: 12px; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<table>
{% if runs|length > 1 %}<tr><th></th>{% for run in runs %}<th>{{ run.label }}</th>{% endfor %}</tr>
{% endif %}{% for label, values in summary %}<tr><th>{{ label }}</th>\
{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% if runs|length > 1 %}<h2>Differences of configuration</h2>
{% if differences %}<table>
<tr><th>key</th>{% for run in runs %}<th>{{ run.label }}</th>{% endfor %}</tr>
{% for key, values in differences %}<tr><th>{{ key }}</th>\
{% for value in values %}<td>{{ value }}</td>{% endfor %}</tr>
{% endfor %}</table>
{% else %}<p>None.</p>
{% endif %}{% endif %}<h2>Curves</h2>
<div class="plots">
{% for name, image in plots %}<img alt="{{ name }}"\
{% if loop.last and runs|length > 1 %} class="wide"{% endif %}
     src="data:image/svg+xml;base64,{{ image }}">
{% endfor %}</div>
{% for run in runs %}{% if run.samples %}<h2>Sample rollouts ({{ run.samples_from }})\
{% if runs|length > 1 %}, {{ run.label }}{% endif %}</h2>
<table class="samples">
<tr>{% for column in run.columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for sample in run.samples %}<tr>
{% for column in run.columns %}{% set text = sample.get(column, "") %}\
<td{% if text|string|length > 40 %} class="long"{% endif %}><div>{{ text }}</div></td>{% endfor %}
</tr>
{% endfor %}</table>
{% endif %}{% endfor %}{% for run in runs %}{% if run.config %}<details>
<summary>Configuration{% if runs|length > 1 %}, {{ run.label }}{% endif %}</summary>
<pre>{{ run.config }}</pre>
</details>
{% endif %}{% endfor %}</body>
</html>
"""


@dataclass(frozen=True)
class RunData:
    """What the page says of one run.

    Args:
        label: what the run is called on the page.
        records: its metrics.
        config: its configuration as it was resolved, "" if it left none.
        samples_from: name of the newest dump of samples.
        samples: the first of its samples.
    """

    label: str
    records: Sequence[Record]
    config: str
    samples_from: str
    samples: Sequence[Mapping[str, Any]]

    @property
    def columns(self) -> list[str]:
        """The samples' columns, in the order in which they appear."""
        return list(dict.fromkeys(column for sample in self.samples for column in sample))


def write_report(run_dir: str | Path, other_dir: str | Path | None = None) -> Path:
    """Writes `report.html` into a run folder, or `comparison.html` where there is another run to
    compare with, and returns its path.

    Raises:
        DataError: a folder holds no metrics.
    """
    folders = [Path(folder) for folder in (run_dir, other_dir) if folder is not None]
    names = [folder.resolve().name for folder in folders]
    labels = [f"{letter}: {name}" for letter, name in zip("AB", names, strict=False)]
    runs = [
        _read(folder, label)
        for folder, label in zip(folders, labels if len(folders) > 1 else names, strict=True)
    ]
    plots = figures({run.label: run.records for run in runs})
    page = Environment(autoescape=True).from_string(TEMPLATE)
    text = page.render(
        title=" and ".join(names),
        runs=runs,
        summary=list(_summary(runs)),
        differences=list(_differences(runs)),
        plots=[(title, base64.b64encode(svg).decode("ascii")) for title, svg in plots],
    )
    path = folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    # Half of a surrogate pair, which JSON can hold, has no UTF-8.
    path.write_bytes(text.encode("utf-8", errors="replace"))
    return path


def _read(folder: Path, label: str) -> RunData:
    metrics = folder / "metrics.jsonl"
    records = read_records(metrics) if os.path.exists(metrics) else []
    if not records:
        raise DataError(
            str(metrics),
            "no steps" if os.path.exists(metrics) else "no such file",
            "the metrics of at least one step",
            "Give the folder of a run that has started, e.g. runs/quickstart-grpo.",
        )
    summary = folder / "summary.json"  # what was measured before the first step stands only there
    before = _measured_before(summary) if summary.exists() else {}
    if before and all(record["step"] for record in records):
        records.insert(0, {"step": 0, **before})
    config = folder / "config.yaml"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    return RunData(label, records, text, *_newest_samples(folder / "rollouts"))


def _measured_before(summary: Path) -> Record:
    """Returns accuracies before the first step, with standard errors, as metrics."""
    try:
        told = parse_json(summary.read_bytes())
        found = {key: value for key, value in told.items() if "accuracy" in key}
    except (ValueError, AttributeError, OSError):  # damaged: the page goes without it
        return {}
    parts = ((key.partition("_before"), value) for key, value in found.items())
    return {
        f"eval/{name}{ending}": value
        for (name, before, ending), value in parts
        if before and (value is None or type(value) in (int, float))
    }


def _newest_samples(directory: Path) -> tuple[str, list[dict[str, Any]]]:
    """Returns the name and the first samples of the newest dump, if there is one."""
    dumps = sorted(directory.glob("step_*.jsonl"))
    if not dumps:
        return "", []
    samples = []
    with dumps[-1].open(encoding="utf-8") as lines:
        for line in lines:
            try:
                samples.append(parse_json(line, allows_half_pairs=True))
            except ValueError:  # the run is still writing it, or was killed
                continue
            if len(samples) == NUM_SAMPLES:
                break
    return dumps[-1].stem, [sample for sample in samples if isinstance(sample, dict)]


def _summary(runs: Sequence[RunData]) -> Iterator[tuple[str, list[str]]]:
    """Yields rows of the table on top: a label, and a value of each run; no row of nothing."""
    yield "steps", [str(run.records[-1]["step"]) for run in runs]
    means = {
        "reward, mean of the last 10 steps": ("reward/mean", ".3f"),
        "seconds a step, mean of the last 10": ("time_s/step", ".3f"),
        "tokens / s / GPU, mean of the last 10": ("throughput/tokens_per_s_per_gpu", ",.0f"),
        "MFU of a step, mean of the last 10": ("mfu/step", ".3f"),
    }
    rows = {
        label: [_format(recent_mean(run.records, name), form) for run in runs]
        for label, (name, form) in means.items()
    }
    peaks = [_finite(run.records, "memory/peak_gib") for run in runs]
    rows["peak memory, GiB"] = [_format(max((v for _, v in p), default=math.nan)) for p in peaks]
    skipped = [_finite(run.records, SKIPPED) for run in runs]
    rows["skipped optimizer steps"] = [f"{sum(v for _, v in s):.0f}" if s else "" for s in skipped]
    for name in _estimates(runs):
        measured = [_measured(run.records, name) for run in runs]
        for place, word in ((0, "first"), (-1, "last")):
            label = f"{word} measured {name.removeprefix('eval/')}"
            rows[label] = [found[place] if found else "" for found in measured]
    for label, values in rows.items():
        if any(values):
            yield label, [value or ABSENT for value in values]


def _estimates(runs: Sequence[RunData]) -> list[str]:
    """Returns the metrics of evaluations that have a standard error; the accuracy first."""
    names = dict.fromkeys(key for run in runs for record in run.records for key in record)
    found = [n for n in names if n.startswith("eval/") and n + STDERR in names and n != ACCURACY]
    return [ACCURACY, *sorted(found)]


def _measured(records: Sequence[Record], name: str) -> list[str]:
    """Returns each value of a metric with its standard error, where there is one, and its step."""
    errors = dict(_finite(records, name + STDERR))
    return [
        f"{value:.3f}" + (f" ± {errors[step]:.3f}" if step in errors else "") + f" (step {step})"
        for step, value in _finite(records, name)
    ]


def _format(value: float, form: str = ".3f") -> str:
    return format(value, form) if math.isfinite(value) else ""


def _finite(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    return [(step, value) for step, value in points(records, name) if math.isfinite(value)]


def _differences(runs: Sequence[RunData]) -> Iterator[tuple[str, list[str]]]:
    """Yields the keys whose values differ between runs, with the value of each."""
    configs = [_flat(run.config) for run in runs]
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config.get(key, ABSENT) for config in configs]
        if len(set(values)) > 1:
            yield key, values


def _flat(config: str) -> dict[str, str]:
    """Returns the values of a configuration by dotted key; nothing of a file that is none."""

    def leaves(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from leaves(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            yield prefix, json.dumps(value)

    try:
        return dict(leaves("", OmegaConf.to_container(parse_yaml(config or "{}"))))
    except (ValueError, OmegaConfBaseException):
        return {}
