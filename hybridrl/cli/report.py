"""`hybridrl report`: an HTML page about one or several runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from hybridrl.config.files import parse_json
from hybridrl.config.load import load_config
from hybridrl.errors import ConfigError, UserError
from hybridrl.parallel.host_gpus import Host
from hybridrl.services.planner.plan_report import plan_report
from hybridrl.services.report.html_page import write_report
from hybridrl.services.report.live_server import LOOPBACK, LiveReport, make_server
from hybridrl.services.report.page_data import RUN_FILE

MAX_RUNS = 8  # number of colours on the page
PHASES = {"usual_train_peak_bytes": "training", "rollout_peak_bytes": "generation"}
Say = Callable[[str], None]


def report_runs(folders: Sequence[Path], port: int | None, say: Say, warn: Say) -> None:
    """Writes the page and prints its path, or serves it on a loopback port until interrupted.

    `port` is 0 for any free port, None to write a file.

    Raises:
        UserError: There are too many runs, or the port cannot be used.
        DataError: A folder has no metrics.
    """
    if len(folders) > MAX_RUNS:
        got = f"{len(folders)} runs"
        raise UserError("RUN_DIR", got, f"at most {MAX_RUNS} runs", "Pass fewer folders.")
    planned = [planned_gib(folder, warn) for folder in folders]
    if port is None:
        say(str(write_report(*folders, planned_gib=planned)))
        return
    with make_server(LiveReport(folders, planned), port) as server:
        say(f"http://{LOOPBACK}:{server.server_port}/  (Ctrl-C stops it)")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


def planned_gib(folder: Path, warn: Say) -> dict[str, float]:
    """Returns the planned peak GiB by phase, of the rank that needs most; empty if unknown."""
    try:
        start = parse_json((folder / RUN_FILE).read_bytes())["starts"][-1]
        world_size, is_cpu = int(start["world_size"]), bool(start["is_cpu"])
    except (OSError, ValueError, LookupError, TypeError):
        return {}  # an older run did not record this
    if is_cpu:
        return {}
    try:
        config = load_config(folder / "config.yaml", is_saved=True)
        report, violations = plan_report(config, world_size, host=Host(num_gpus=world_size))
        if violations:
            raise ConfigError(violations)
    except UserError as error:
        warn(f"{folder}: planned memory is not shown: {error}")
        return {}
    memory = report["memory"]
    return {name: memory[key] / 2**30 for key, name in PHASES.items() if memory.get(key)}


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder.")],
    other_runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[OTHER_RUN]...", help="Runs to compare with.")
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Serve the page on loopback and update it while the run continues."
        ),
    ] = False,
    port: Annotated[int, typer.Option(help="Port for --live; 0 for any free port.")] = 0,
) -> None:
    """Write an HTML page with the curves, samples and evaluations of one or several runs, and print
    its path.
    """
    folders = [run_dir, *(other_runs or [])]
    report_runs(folders, port if live else None, typer.echo, lambda t: typer.echo(t, err=True))
