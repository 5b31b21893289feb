"""`hybridrl top`: shows the state of a run from the files in its folder. No torch."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.live import Live
from rich.text import Text

from hybridrl.checkpoint.run_lock import holder
from hybridrl.errors import UserError
from hybridrl.loop.run_starts import FINISHED, read_starts
from hybridrl.metrics.sinks import read_records
from hybridrl.metrics.values import Record
from hybridrl.parallel.watch import ranks_text
from hybridrl.services.liveness.hang_reports import newest_report

METRICS = "metrics.jsonl"
# Formats for metrics of the last step, in the order of printing.
LAST_STEP = {
    "time_s/step": "{:.2f} s per step",
    "throughput/tokens_per_s_per_gpu": "{:.0f} tokens/s per rank",
    "reward/mean": "reward {:.3f}",
    "policy/loss": "loss {:.3f}",
    "memory/peak_gib": "at most {:.2f} GiB on a rank",
}
# Formats for metrics of runs with max_policy_lag above 0, which generate samples for later steps.
QUEUE = {
    "lag/unfinished": "{:.0f} samples unfinished",
    "lag/waiting": "{:.0f} finished samples waiting for a step",
    "lag/dropped": "{:.0f} dropped",
    "lag/mean": "weights {:.2f} steps old",
    "lag/max": "{:.0f} at most",
    "idle/training": "training ranks wait {:.0%} of the time",
    "idle/rollout": "generating ranks {:.0%}",
}


def run_text(folder: Path) -> str:
    """Returns the text of `hybridrl top`; raises UserError if the folder is not a run folder."""
    logs, file, config = folder / "logs", folder / METRICS, folder / "config.yaml"
    if not logs.is_dir():
        found = "a folder without logs" if folder.is_dir() else "no such folder"
        remedy = "Correct the path; run folders are in run.dir, by default `runs`."
        raise UserError(str(folder), found, "a run folder", remedy)
    holds = holder(folder)
    is_running = holds is not None and not holds.is_stale(folder)
    state = f"held by {holds}" if is_running else _end_of(folder)
    if holds is not None and not is_running:
        state += f"; {holds}, no longer runs"
    records = read_records(file) if file.exists() else []
    last = records[-1] if records else {}
    steps = yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else {}
    section = steps.get("steps", {})
    done = f"step {int(last.get('step') or 0)}"
    if epochs := section.get("num_epochs"):  # the run computes the number of steps from its rows
        done += f", epoch {last.get('train/epoch', 0):.2f} of {epochs:g}"
    else:
        done += f"/{section.get('num_steps', '?')}"
    lines = [f"{folder.resolve().name}: {done}, {state}"]
    for title, forms in (("last step", LAST_STEP), ("queue", QUEUE)):
        if values := _shown(last, forms):
            lines.append(f"{title}: " + ", ".join(values))
    if is_running and (agents := _agents(logs)):
        lines.append(f"agents: {agents}")
    # One line per phase, because a line per rank would not fit on the screen for large clusters.
    phases = _phases(logs)
    for phase, since_s in sorted(phases.items(), key=lambda item: len(item[1])):
        shortest, longest = min(since_s.values()), max(since_s.values())
        since = f"{longest:.0f} s" if longest - shortest < 1 else f"{shortest:.0f}-{longest:.0f} s"
        if is_running:
            lines.append(f"  {phase}: {ranks_text(since_s)} for {since}")
        elif not state.startswith(FINISHED):
            lines.append(f"  ended in {phase}: {ranks_text(since_s)}")
    hang = newest_report(folder, file.stat().st_mtime if file.exists() else 0.0)
    if hang is not None:
        lines.append(f"{hang[1]}; all ranks: {hang[0]}")
    if not phases and not state.startswith(FINISHED):
        lines.append("  no rank has started")
    return "\n".join(lines)


def watch(folder: Path, every_s: float) -> None:
    """Prints the state of a run; on a terminal, updates it in place until Ctrl-C."""
    text = run_text(folder)
    if not sys.stdout.isatty():
        print(text)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(Text(text), auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(Text(run_text(folder)), refresh=True)


def _end_of(folder: Path) -> str:
    starts = read_starts(folder)
    if not starts:
        return "no process holds the folder"
    if "exit" not in starts[-1]:  # the process was killed, or its host failed
        return "ended without a record"
    return f"{starts[-1]['exit']}, {starts[-1].get('ended', 'time unknown')}"


def _phases(logs: Path) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for file in logs.glob("rank_*.phase"):
        with contextlib.suppress(OSError, ValueError):  # a new start removes these files
            rank = int(file.stem.removeprefix("rank_"))
            phase, written = file.read_text().strip(" \n\0"), file.stat().st_mtime
            phase += ", failed" * file.with_suffix(".error").exists()
            found.setdefault(phase, {})[rank] = max(0.0, time.time() - written)
    return found


def _agents(logs: Path) -> str:
    total: Counter[str] = Counter()
    for file in logs.glob("rank_*.agents"):
        with contextlib.suppress(OSError, ValueError):  # a run that ends removes these files
            total.update(json.loads(file.read_text()))
    if not total:
        return ""
    return (
        f"{total['running']} sessions open, {total['turns']} turns requested, "
        f"{total['waiting']} episodes waiting, {total['ended']} ended, {total['failed']} failed"
    )


def _shown(record: Record, forms: Mapping[str, str]) -> list[str]:
    found = {name: record.get(name) for name in forms}
    return [forms[name].format(value) for name, value in found.items() if value is not None]


def top(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 2.0,
) -> None:
    """Show the state of a run until Ctrl-C, or once if the output is not a terminal."""
    watch(run_dir, every_s)
