"""Writes one HTML page about one or several run folders, as a single file that needs no network.

Rollout texts are untrusted: the page contains them as JSON without a "<", and its script inserts
them as text nodes; the Content-Security-Policy allows only the package's own scripts and styles, by
their digests, images within the page, and connections to its own server.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.interpolation import leaves
from hybridrl.config.yaml_text import parse_yaml
from hybridrl.metrics.values import ACCURACY, SKIPPED, Record, recent_mean
from hybridrl.services.report.page_data import RunData, points, read_run
from hybridrl.services.report.plots import figures

ABSENT = "–"
PAGE = Path(__file__).parent / "page"
SCRIPTS = ("uPlot.iife.min.js", "figures.js", "samples.js", "page.js")
STYLES = ("uPlot.min.css", "page.css")

TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{{ policy }}">
<title>{{ title }}</title>
{% for text in styles %}<style>{{ text|safe }}</style>
{% endfor %}</head>
<body>
<noscript>This page needs JavaScript to draw its figures; the script is part of the page.</noscript>
<script type="application/json" id="data">{{ data|safe }}</script>
{% for text in scripts %}<script>{{ text|safe }}</script>
{% endfor %}</body>
</html>
"""


def write_report(
    run_dir: str | Path, *other_dirs: str | Path, planned_gib: Sequence[Mapping[str, float]] = ()
) -> Path:
    """Writes `report.html`, or `comparison.html` of several runs; DataError without metrics."""
    folders = [Path(run_dir), *map(Path, other_dirs)]
    text = page(page_data(folders, planned_gib))
    path = folders[0] / ("report.html" if len(folders) == 1 else "comparison.html")
    path.write_bytes(text)
    return path


def page_data(
    folders: Sequence[Path], planned_gib: Sequence[Mapping[str, float]] = ()
) -> dict[str, Any]:
    """Returns all data that the page shows about run folders; DataError without metrics."""
    names = [folder.resolve().name for folder in folders]
    letters = [chr(ord("A") + number) for number in range(26)]
    labels = [f"{letter}: {name}" for letter, name in zip(letters, names, strict=False)]
    labels = labels if len(folders) > 1 else names
    planned = [*planned_gib, *[{}] * (len(folders) - len(planned_gib))]
    runs = list(map(read_run, folders, labels, planned))
    return {
        "title": names[0] if len(names) == 1 else " and ".join(names),
        "summary": [list(_rows([of(run) for run in runs])) for of in (_facts, _results)],
        "evaluations": [table for run in runs if (table := evaluations(run))],
        "differences": list(_differences(runs)) if len(runs) > 1 else None,
        "groups": figures(set().union(*(run.names for run in runs))),
        "runs": [run.as_json() for run in runs],
    }


def page(data: Mapping[str, Any], tag: str | None = None) -> bytes:
    """Returns the page in UTF-8. `tag` is the state of run folders that a server follows."""
    template = Environment(autoescape=True).from_string(TEMPLATE)
    scripts, styles = _texts(SCRIPTS), _texts(STYLES)
    text = template.render(
        title=data["title"],
        policy=content_security_policy(tag is not None),
        data=embedded({**data, "tag": tag}),
        scripts=scripts,
        styles=styles,
    )
    # UTF-8 cannot encode a lone surrogate, so it is written as its JSON escape.
    return text.encode("utf-8", errors="backslashreplace")


def embedded(data: object) -> str:
    """Returns data as JSON in which no text can close the HTML element or open another."""
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # "<" occurs only in strings, where JSON allows this escape.
    return text.replace("<", "\\u003c")


def content_security_policy(is_live: bool) -> str:
    """Returns the page's policy: the package's own scripts and styles, and a live page's server."""
    parts = {
        "default-src": "'none'",
        "script-src": " ".join(map(_digest, _texts(SCRIPTS))),
        "style-src": " ".join(map(_digest, _texts(STYLES))),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        **({"connect-src": "'self'"} if is_live else {}),
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items())


@cache
def _texts(names: Sequence[str]) -> list[str]:
    # Browsers compute a script's digest with "\n" line endings.
    return [(PAGE / name).read_text(encoding="utf-8").strip() for name in names]


def _digest(text: str) -> str:
    found = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(found).decode('ascii')}'"


@dataclass(frozen=True)
class _Config:
    values: Mapping[str, Any]

    def of(self, *keys: str) -> str:
        for key in keys:
            value = self.values.get(key)
            if value not in (None, [], ""):
                return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        return ""

    def joined(self, section: str, keys: Sequence[str]) -> str:
        found = {key: self.values.get(f"{section}.{key}") for key in keys}
        if all(value is None for value in found.values()):
            return ""
        shown = [f"{key} {value}" for key, value in found.items() if value not in (None, 1)]
        return ", ".join(shown) or f"{keys[0]} 1"


def _rows(columns: Sequence[Mapping[str, str]]) -> Iterator[tuple[str, list[str]]]:
    for label in columns[0]:
        values = [column[label] for column in columns]
        if any(values):
            yield label, [value or ABSENT for value in values]


def _facts(run: RunData) -> dict[str, str]:
    config = _Config(_flat(run.config))
    last = run.starts[-1] if run.starts else {}

    def noted(key: str) -> str:
        return str(last.get(key) or "")

    engine = config.of("rollout.engine")
    ranks = last.get("world_size")
    sizes = [config.joined("train", ("tp", "pp", "vpp", "cp", "ep")), _data_parallel(config, ranks)]
    of_engine = f"{engine}: {config.joined('rollout', ('tp', 'ep'))}" if engine else ""
    layout = [", ".join(filter(None, sizes)), of_engine]
    hardware = f"{ranks} × {noted('device')}" if ranks else ""
    hosts = last.get("hosts")
    steps = run.records[-1]["step"]
    # With epochs, the run computes the number of steps from its rows.
    planned = None if config.of("steps.num_epochs") else config.of("steps.num_steps")
    return {
        "model": config.of("model.path", "model.init"),
        "data": config.of("data.prompts"),
        "algorithm": config.of("algorithm.name"),
        "layout": "; ".join(part for part in layout if part),
        "hardware": f"{hardware}, {hosts} hosts" if hosts and hosts > 1 else hardware,
        "hybridrl": ", commit ".join(filter(None, (noted("version"), noted("commit")[:12]))),
        "began": str(run.starts[0].get("began") or "") if run.starts else "",
        "starts": str(len(run.starts)) if len(run.starts) > 1 else "",
        "ended": noted("ended"),
        "exit": noted("exit") or ("finished" if run.has_finished else ""),
        "steps": f"{steps} of {planned}" if planned else str(steps),
    }


def _data_parallel(config: _Config, ranks: object) -> str:
    has_own = any(v is not None for k, v in config.values.items() if k.endswith(".ranks"))
    split = [config.values.get(f"train.{axis}", 1) for axis in ("tp", "pp", "cp")]
    if has_own or not isinstance(ranks, int) or not all(isinstance(size, int) for size in split):
        return ""
    size = ranks // int(math.prod(split))
    return f"dp {size}" if size > 1 else ""


def _results(run: RunData) -> dict[str, str]:
    means = {
        "reward, mean of the last 10 steps": ("reward/mean", ".3f"),
        "seconds per step, mean of the last 10": ("time_s/step", ".3f"),
        "tokens / s / GPU, mean of the last 10": ("throughput/tokens_per_s_per_gpu", ",.0f"),
        "MFU of a step, mean of the last 10": ("mfu/step", ".3f"),
    }
    found = {
        label: _format(recent_mean(run.records, name), form)
        for label, (name, form) in means.items()
    }
    peaks = _finite(run.records, "memory/peak_gib")
    found["peak memory, GiB"] = _format(max((v for _, v in peaks), default=math.nan))
    planned = {phase: f"{size:.3f} in {phase}" for phase, size in run.planned_gib.items()}
    found["peak memory as planned, GiB"] = ", ".join(planned.values())
    skipped = _finite(run.records, SKIPPED)
    found["skipped optimizer steps"] = f"{sum(v for _, v in skipped):.0f}" if skipped else ""
    measured = _finite(run.records, ACCURACY)
    for place, label in ((0, "first measured accuracy"), (-1, "last measured accuracy")):
        found[label] = "{1:.3f} (step {0})".format(*measured[place]) if measured else ""
    return found


def _format(value: float, form: str = ".3f") -> str:
    return format(value, form) if math.isfinite(value) else ""


def _finite(records: Sequence[Record], name: str) -> list[tuple[int, float]]:
    return [(step, value) for step, value in points(records, name) if math.isfinite(value)]


def evaluations(run: RunData) -> dict[str, Any] | None:
    """Returns the table of a run's evaluations, newest step first; None if there are none."""
    errors = "_stderr"
    names = sorted(n for n in run.names if n.startswith("eval/") and not n.endswith(errors))
    rows = []
    for record in run.records:
        if not any(name in record for name in names):
            continue
        cells = []
        for name in names:
            value, error = record.get(name), record.get(name + errors)
            text = "" if value is None else f"{value:.4f}"
            cells.append(text if error is None or not text else f"{text} ± {error:.4f}")
        rows.append([str(record["step"]), *cells])
    if not rows:
        return None
    columns = ["step", *(name.removeprefix("eval/") for name in names)]
    return {"label": run.label, "columns": columns, "rows": rows[::-1]}


def _differences(runs: Sequence[RunData]) -> Iterator[tuple[str, list[str]]]:
    configs = [{k: json.dumps(v) for k, v in _flat(run.config).items()} for run in runs]
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config.get(key, ABSENT) for config in configs]
        if len(set(values)) > 1:
            yield key, values


def _flat(config: str) -> dict[str, Any]:
    try:
        content = OmegaConf.to_container(parse_yaml(config or "{}"))
    except (ValueError, OmegaConfBaseException):
        return {}
    return leaves(content) if isinstance(content, dict) else {}
