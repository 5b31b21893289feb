"""`hybridrl top`: what a run is doing now, from the files in its folder. No torch."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from hybridrl.services.liveness.hang_reports import newest_report

METRICS = "metrics.jsonl"
# How metrics of the last step are shown, in order.
LAST_STEP = {
    "time_s/step": "{:.2f} s a step",
    "throughput/tokens_per_s_per_gpu": "{:.0f} tokens/s a rank",
    "reward/mean": "reward {:.3f}",
    "policy/loss": "loss {:.3f}",
    "memory/peak_gib": "{:.2f} GiB at most on a rank",
}
# Of runs with a lag, where samples are under way for later steps.
QUEUE = {
    "lag/unfinished": "{:.0f} samples unfinished",
    "lag/waiting": "{:.0f} finished ones wait for a step",
    "lag/dropped": "{:.0f} thrown away",
    "lag/mean": "weights {:.2f} steps old",
    "lag/max": "{:.0f} at most",
    "idle/training": "ranks that train wait {:.0%} of the time",
    "idle/rollout": "ranks that generate {:.0%}",
}


@dataclass(frozen=True)
class RankNow:
    """What a rank is doing.

    Args:
        index: of the rank.
        phase: that it is in, with the step.
        since_s: seconds since the phase began.
        has_failed: whether it has left an error.
    """

    index: int
    phase: str
    since_s: float
    has_failed: bool


@dataclass(frozen=True)
class RunNow:
    """What a run is doing.

    Args:
        name: of the run folder.
        state: who holds the folder, or how the run ended.
        is_running: whether somebody holds it and lives.
        num_steps: the last step; None where it is not known.
        last: metrics of the last finished step; empty before.
        ranks: by their number.
        hang: ranks without progress, and the file with what all ranks do; "" once a step was taken.
    """

    name: str
    state: str
    is_running: bool
    num_steps: int | None
    last: Record
    ranks: Sequence[RankNow]
    hang: str = ""


def read_run(folder: Path) -> RunNow:
    """Returns what a run is doing.

    Raises:
        UserError: there is no run.
    """
    logs = folder / "logs"
    if not logs.is_dir():
        raise UserError("RUN", folder, "a run folder", "Check the path; runs are in run.dir.")
    found = holder(folder)
    is_running = found is not None and not found.is_stale(folder)
    state = f"held by {found}" if is_running else _end_of(folder)
    if found is not None and not is_running:
        state += f"; {found}, no longer runs"
    file, config = folder / METRICS, folder / "config.yaml"
    records = read_records(file) if file.exists() else []
    steps = yaml.safe_load(config.read_text(encoding="utf-8")) if config.exists() else {}
    num_steps = steps.get("steps", {}).get("num_steps")
    last = records[-1] if records else {}
    report = newest_report(folder, file.stat().st_mtime if file.exists() else 0.0)
    hang = "" if report is None else f"{report[1]}; all ranks: {report[0]}"
    name = folder.resolve().name
    return RunNow(name, state, is_running, num_steps, last, _ranks(logs), hang)


def watch(folder: Path, every_s: float) -> None:
    """Prints what a run is doing; on a terminal again and again in the same place, until Ctrl-C.

    Raises:
        UserError: there is no run.
    """
    text = run_text(read_run(folder))
    if not sys.stdout.isatty():
        print(text)
        return
    with contextlib.suppress(KeyboardInterrupt), Live(Text(text), auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            live.update(Text(run_text(read_run(folder))), refresh=True)


def _end_of(folder: Path) -> str:
    """Returns how a run that no process holds ended."""
    starts = read_starts(folder)
    if not starts:
        return "no process holds the folder"
    if "exit" not in starts[-1]:  # killed, or its host is gone
        return "ended without a word"
    return f"{starts[-1]['exit']}, {starts[-1].get('ended', 'time unknown')}"


def _ranks(logs: Path) -> list[RankNow]:
    found = []
    for file in logs.glob("rank_*.phase"):
        number = file.stem.removeprefix("rank_")
        try:
            phase, written = file.read_text().strip(" \n\0"), file.stat().st_mtime
        except OSError:  # a start removes the files of the one before
            continue
        if number.isdigit():
            since = max(0.0, time.time() - written)
            is_error = file.with_suffix(".error").exists()
            found.append(RankNow(int(number), phase, since, is_error))
    return sorted(found, key=lambda rank: rank.index)


def run_text(run: RunNow) -> str:
    """Returns the lines that `hybridrl top` prints."""
    goal = "?" if run.num_steps is None else run.num_steps
    lines = [f"{run.name}: step {int(run.last.get('step') or 0)}/{goal}, {run.state}"]
    for title, forms in (("last step", LAST_STEP), ("queue", QUEUE)):
        if values := _shown(run.last, forms):
            lines.append(f"{title}: " + ", ".join(values))
    # Ranks that do the same stand in one line: a cluster's do not fit on a screen.
    phases: dict[str, list[RankNow]] = {}
    for rank in () if run.state.startswith(FINISHED) else run.ranks:
        phases.setdefault(rank.phase + ", failed" * rank.has_failed, []).append(rank)
    for phase, ranks in sorted(phases.items(), key=lambda item: len(item[1])):
        if not run.is_running:
            lines.append(f"  ended in {phase}: {_numbers([rank.index for rank in ranks])}")
            continue
        shortest, longest = (choose(rank.since_s for rank in ranks) for choose in (min, max))
        since = f"{longest:.0f} s" if longest - shortest < 1 else f"{shortest:.0f}-{longest:.0f} s"
        lines.append(f"  {phase}: {_numbers([rank.index for rank in ranks])} for {since}")
    if run.hang:
        lines.append(run.hang)
    if not run.ranks:
        lines.append("  no rank has begun")
    return "\n".join(lines)


def _shown(record: Record, forms: Mapping[str, str]) -> list[str]:
    """Returns the metrics that a record has, in their forms."""
    found = {name: record.get(name) for name in forms}
    return [forms[name].format(value) for name, value in found.items() if value is not None]


def _numbers(ranks: Sequence[int]) -> str:
    """Returns ascending rank numbers, neighbours as a range."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    names = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
    return ("rank " if len(ranks) == 1 else "ranks ") + ",".join(names)


def top(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between readings.")] = 2.0,
) -> None:
    """Show what a run is doing, until Ctrl-C; once where the output is no terminal."""
    watch(run_dir, every_s)
