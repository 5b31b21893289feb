"""`hybridrl plan`: a report on one layout, or a search for the best layouts. No torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from hybridrl.cli.options import ConfigFile, Json, Overrides, World, json_only
from hybridrl.config.identity import pinned
from hybridrl.config.load import load_config
from hybridrl.config.rules import default_world_size
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, UserError
from hybridrl.parallel.host_gpus import Host, local_host
from hybridrl.services.planner.choose import search, search_with_adapters, with_layout
from hybridrl.services.planner.hardware import ClusterFile, load_cluster, merged
from hybridrl.services.planner.plan_report import empty_report, plan_report
from hybridrl.services.planner.plan_text import plan_text
from hybridrl.services.planner.search import pinned_keys
from hybridrl.services.planner.search_report import search_report, search_text
from hybridrl.services.planner.times import engine_note

Emit = Callable[[object], None]
Outcome = tuple[str, list[UserError]]


def run_plan(
    file: Path,
    overrides: Sequence[str],
    world: int | None,
    cluster: Path | None,
    emit: Emit,
    is_full: bool,
) -> Outcome:
    """Plans one layout, which `layout: auto` chooses first. `emit` prints the report as JSON."""
    try:
        config, world_size, given, host = _inputs(file, overrides, world, cluster)
        config = with_layout(config, world_size, host, given)
        report, violations = plan_report(config, world_size, given, host)
    except ConfigError as error:
        report, violations = empty_report(error), error.violations
    emit(report)
    return "" if violations else plan_text(report, is_full), violations


def run_search(
    file: Path,
    overrides: Sequence[str],
    world: int | None,
    cluster: Path | None,
    emit: Emit,
    _: bool,
) -> Outcome:
    """Compares all layouts compatible with the keys that are set; arguments as in `run_plan`."""
    try:
        config, world_size, given, host = _inputs(file, overrides, world, cluster)
        started = time.monotonic()
        result, assumed = search(config, world_size, host, given)
    except ConfigError as error:
        emit({"violations": error.as_json()})
        return "", error.violations
    adapted = None if result.best else search_with_adapters(config, world_size, host, given)
    seconds = time.monotonic() - started
    note = engine_note(config)
    report = search_report(result, assumed, seconds, pinned_keys(config), note, adapted)
    emit(report)
    return search_text(report), []


def _inputs(
    file: Path, overrides: Sequence[str], world: int | None, cluster: Path | None
) -> tuple[Config, int, ClusterFile | None, Host]:
    config = pinned(load_config(file, overrides), asks_hub=False)
    given, host = load_cluster(cluster) if cluster else None, local_host()
    known = merged(config.cluster, given)
    size = known.world_size() if known else None
    return config, world or size or default_world_size(config, host.num_gpus), given, host


def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    world: World = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML or JSON file with the keys of the section `cluster`, or a text such as "
            "8x8xH200.",
        ),
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search", help="Print the ten best layouts, and why other layouts are worse."
        ),
    ] = False,
    all_ranks: Annotated[
        bool, typer.Option("--all", help="List every rank and all assumptions.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Report whether a run fits into memory, and its layouts, weight transfer and memory; needs
    neither a GPU nor weights.
    """
    with json_only(as_json) as emit:
        run = run_search if search else run_plan
        text, violations = run(config, overrides or [], world, cluster, emit, all_ranks)
    if violations:
        raise ConfigError(violations)
    if not as_json:
        typer.echo(text)
