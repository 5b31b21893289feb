"""One HTML page about a run: curves, configuration and sample rollouts, in one file without links.

Reads a run folder and nothing else; imports no torch. What a run did not record is left out.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hybridrl.errors import DataError
from hybridrl.metrics.sinks import read_records
from hybridrl.metrics.values import ACCURACY, PHASES, Record, recent_mean

NUM_SAMPLES = 20

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{{ name }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 74rem; padding: 0 1rem; }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
.plots img { width: 36rem; max-width: 100%; }
table { border-collapse: collapse; font-size: 13px; }
td, th { border: 1px solid #ccc; padding: .2rem .6rem; text-align: left; vertical-align: top; }
pre, td { white-space: pre-wrap; overflow-wrap: anywhere; }
pre { background: #f5f5f5; padding: 1rem; }
</style>
</head>
<body>
<h1>{{ name }}</h1>
<table>
{% for label, value in summary %}<tr><th>{{ label }}</th><td>{{ value }}</td></tr>
{% endfor %}</table>
<h2>Curves</h2>
<div class="plots">
{% for title, image in plots %}<img alt="{{ title }}" src="data:image/svg+xml;base64,{{ image }}">
{% endfor %}</div>
{% if samples %}<h2>Sample rollouts ({{ samples_from }})</h2>
<table>
<tr>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>
{% for sample in samples %}<tr>
{% for column in columns %}<td>{{ sample[column] }}</td>{% endfor %}
</tr>
{% endfor %}</table>
{% endif %}{% if config %}<h2>Configuration</h2>
<pre>{{ config }}</pre>
{% endif %}</body>
</html>
"""


@dataclass(frozen=True)
class Plot:
    """A figure of the page: its title, the metrics it shows, and what the vertical axis counts."""

    title: str
    metrics: dict[str, str]
    unit: str = ""
    is_stacked: bool = False


PLOTS = (
    Plot("Reward", {"mean": "reward/mean", "std": "reward/std"}),
    Plot("Accuracy on held-out prompts, greedy", {"accuracy": ACCURACY}),
    Plot("Policy loss", {"loss": "policy/loss"}),
    Plot("KL", {"KL": "policy/kl"}, "nats"),
    Plot("Entropy", {"entropy": "policy/entropy"}, "nats"),
    Plot("Gradient norm", {"norm": "policy/grad_norm"}),
    Plot("Response length", {"mean": "response_tokens/mean"}, "tokens"),
    Plot(
        "Log-probability difference, engine and trainer",
        {"mean": "mismatch/logprob_diff_mean", "largest": "mismatch/logprob_diff_max"},
        "nats",
    ),
    Plot("KL of the trainer from the engine", {"KL": "mismatch/kl"}, "nats"),
    Plot("Correlation of engine and trainer", {"Pearson's": "mismatch/correlation"}),
    Plot("Time of a step", {p: f"time_s/{p}" for p in PHASES}, "seconds", is_stacked=True),
    Plot("Throughput", {"rate": "throughput/tokens_per_s_per_gpu"}, "tokens / s / GPU"),
)


def write_report(run_dir: str | Path) -> Path:
    """Writes `report.html` into a run folder and returns its path.

    Raises:
        DataError: the folder holds no metrics.
    """
    run_dir = Path(run_dir)
    metrics = run_dir / "metrics.jsonl"
    records = read_records(metrics) if metrics.exists() else []
    if not records:
        raise DataError(
            str(metrics),
            "no steps" if metrics.exists() else "no such file",
            "the metrics of at least one step",
            "Give the folder of a run that has started, e.g. runs/quickstart-grpo.",
        )
    config = run_dir / "config.yaml"
    samples_from, samples = _newest_samples(run_dir / "rollouts")
    page = Environment(autoescape=True).from_string(TEMPLATE)
    text = page.render(
        name=run_dir.resolve().name,
        summary=_summary(records),
        plots=[(plot.title, _draw(plot, records)) for plot in PLOTS if _has_any(plot, records)],
        samples=samples,
        samples_from=samples_from,
        columns=list(dict.fromkeys(column for sample in samples for column in sample)),
        config=config.read_text(encoding="utf-8") if config.exists() else None,
    )
    path = run_dir / "report.html"
    path.write_text(text, encoding="utf-8")
    return path


def _summary(records: Sequence[Record]) -> list[tuple[str, str]]:
    rows = [("steps", str(records[-1]["step"]))]
    for label, name in (
        ("reward, mean of the last 10 steps", "reward/mean"),
        ("seconds a step, mean of the last 10", "time_s/step"),
    ):
        if any(record.get(name) is not None for record in records):
            rows.append((label, f"{recent_mean(records, name):.3f}"))
    accuracies = _points(records, ACCURACY)
    if accuracies:
        rows.append(("first measured accuracy", "{1:.3f} (step {0})".format(*accuracies[0])))
        rows.append(("last measured accuracy", "{1:.3f} (step {0})".format(*accuracies[-1])))
    return rows


def _newest_samples(directory: Path) -> tuple[str, list[dict[str, Any]]]:
    """Returns the name and the first samples of the newest dump, if there is one."""
    dumps = sorted(directory.glob("step_*.jsonl"))
    if not dumps:
        return "", []
    lines = dumps[-1].read_text(encoding="utf-8").splitlines()[:NUM_SAMPLES]
    return dumps[-1].stem, [json.loads(line) for line in lines]


def _points(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    return [
        (int(record["step"] or 0), float(value))
        for record in records
        if (value := record.get(name)) is not None
    ]


def _has_any(plot: Plot, records: Sequence[Record]) -> bool:
    return any(_points(records, name) for name in plot.metrics.values())


def _draw(plot: Plot, records: Sequence[Record]) -> str:
    """Returns the plot as SVG in base64."""
    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.add_subplot()
    draw: Callable[[Axes, Plot, Sequence[Record]], None] = _stack if plot.is_stacked else _lines
    draw(axes, plot, records)
    axes.set_title(plot.title)
    axes.set_xlabel("step")
    axes.set_ylabel(plot.unit)
    axes.grid(alpha=0.3)
    if len(plot.metrics) > 1:
        axes.legend(loc="best", fontsize="small")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg")
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def _lines(axes: Axes, plot: Plot, records: Sequence[Record]) -> None:
    for label, name in plot.metrics.items():
        points = _points(records, name)
        if points:
            steps, values = zip(*points, strict=True)
            axes.plot(steps, values, label=label, marker="." if len(points) < 40 else "")


def _stack(axes: Axes, plot: Plot, records: Sequence[Record]) -> None:
    names = list(plot.metrics.values())
    rows = [record for record in records if any(record.get(name) is not None for name in names)]
    steps = [int(record["step"] or 0) for record in rows]
    heights = [[float(record.get(name) or 0.0) for record in rows] for name in names]
    axes.stackplot(steps, heights, labels=list(plot.metrics))
