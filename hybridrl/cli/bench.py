"""`hybridrl bench rollout`: measures how fast each installed engine generates for a run. No torch.

The parent starts the ranks of one engine after another and waits until they end.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from importlib.metadata import version
from typing import Annotated, Any

import typer

from hybridrl.cli.check import refuse_without_rollouts
from hybridrl.cli.options import ConfigFile, Json, Overrides, World, json_only, refuse_other_job
from hybridrl.config.load import load_config
from hybridrl.config.schema import Config
from hybridrl.console import say
from hybridrl.errors import UserError
from hybridrl.loop.preflight import validate_training
from hybridrl.parallel.failure import is_launched, rank_file
from hybridrl.parallel.host_gpus import num_local_gpus
from hybridrl.rollout.registry import engine_package, offered_engines
from hybridrl.services.launch.local_ranks import is_rank, leave_for_parent, report_of_ranks
from hybridrl.services.launch.pinning import laid_out, with_commits
from hybridrl.services.planner.text import memory_size

Load = Callable[[Sequence[str]], tuple[Config, int]]
"""Function that returns the configuration with some overrides applied, and the number of ranks."""


def measured_engines(asked: str | None) -> list[str]:
    """Returns the engines in a comma-separated list, or all installed ones that can generate."""
    computing = offered_engines()
    if asked is None:
        packages = {name: engine_package(name) for name in computing}
        return [n for n, package in packages.items() if package is None or package.is_installed()]
    names = list(dict.fromkeys(name.strip() for name in asked.split(",")))
    for name in names:
        if name not in computing:
            allowed = f"one or more of {', '.join(computing)}, separated by commas"
            raise UserError("--engines", name, allowed, "Choose from the allowed engines.")
    return names


def measure(
    names: Sequence[str],
    all_must: bool,
    overrides: Sequence[str],
    load: Load,
    arguments: Sequence[str],
) -> tuple[dict[str, Any], int]:
    """Measures one engine after another and prints each result immediately on stdout.

    `arguments` are those of the ranks' command. Returns the report, with one entry per engine in
    `engines`, and the exit code: that of the first engine whose ranks fail.

    Raises:
        UserError: No engine can generate for this run, or one cannot and `all_must` is set.
    """
    # Use an empty folder, because the run's own folder may refuse a changed engine.
    with tempfile.TemporaryDirectory(prefix="hybridrl-bench-") as folder:
        changes = {name: (f"rollout.engine={name}", f"run.dir={folder}") for name in names}
        checked: dict[str, tuple[Config, int] | UserError] = {}
        for name, changed in changes.items():
            try:
                checked[name] = _checked(load, (*overrides, *changed))
            except UserError as error:
                if all_must:
                    raise
                checked[name] = error
        fitting = [found for found in checked.values() if not isinstance(found, UserError)]
        if not fitting:
            raise next(error for error in checked.values() if isinstance(error, UserError))
        report: dict[str, Any] = {**_sizes(*fitting[0]), "engines": []}
        print(title(report), flush=True)
        for name, found in checked.items():
            if isinstance(found, UserError):
                entry = {"engine": name, "refused": " ".join(str(found).splitlines())}
            else:
                print(f"{name:8} is starting", flush=True)
                command = ["bench", "rollout", *arguments, *overrides, *changes[name]]
                measured = report_of_ranks(command, found[1])
                if isinstance(measured, int):
                    return report, measured
                entry = {"engine": name, "version": _version(name), **measured}
            report["engines"].append(entry)
            print(line(entry), flush=True)
    return report, 0


def measure_on_rank(load: Callable[[], Config], num_rounds: int) -> None:
    """Measures on one rank that the parent command started; rank 0 writes the report for it."""
    log = rank_file(".log")
    if log is None or not is_launched():
        found = "ranks of torchrun"
        allowed = "one process, which starts the ranks for each engine itself"
        raise UserError("hybridrl bench rollout", found, allowed, "Run it without torchrun.")
    started = time.monotonic()
    from hybridrl.loop.rollout_speed import measure_rank

    config, is_first = load(), os.environ["RANK"] == "0"

    def tell(text: str) -> None:
        if is_first:
            say(f"{config.rollout.engine:8} {text}")

    # Messages about starting a trainer are written to the log.
    with log.open("a", encoding="utf-8") as output, redirect_stdout(output):
        report = measure_rank(config, num_rounds, started, tell)
    if is_first:
        leave_for_parent(report)


def _checked(load: Load, overrides: Sequence[str]) -> tuple[Config, int]:
    config, world_size = load(overrides)
    refuse_without_rollouts(config, "bench rollout")
    validate_training(config, world_size)
    return config, world_size


def _version(name: str) -> str:
    package = engine_package(name)
    if package is None:
        return f"transformers {version('transformers')}"
    return package.installed_version(num_local_gpus() == 0)


def _sizes(config: Config, world_size: int) -> dict[str, int]:
    return {
        "world_size": world_size,
        "tp": config.rollout.tp,
        "ep": config.rollout.ep,
        "prompts": config.steps.prompts_per_step,
        "samples_per_prompt": config.steps.samples_per_prompt,
        "prompt_tokens": config.data.max_prompt_tokens,
        "new_tokens": config.rollout.max_new_tokens,
    }


def title(sizes: Mapping[str, Any]) -> str:
    engine = f"TP{sizes['tp']}" + (f" EP{sizes['ep']}" if sizes["ep"] > 1 else "")
    return (
        f"{sizes['prompts']} prompts x {sizes['samples_per_prompt']} responses, "
        f"{sizes['prompt_tokens']} + {sizes['new_tokens']} tokens each; "
        f"{sizes['world_size']} ranks, engines of {engine}"
    )


def line(entry: Mapping[str, Any]) -> str:
    if "refused" in entry:
        return f"{entry['engine']:8} not measured: {entry['refused']}"
    engine, rank = (memory_size(entry[key]) for key in ("engine_bytes", "rank_bytes"))
    return (
        f"{entry['engine']:8} {entry['tokens_per_s']:10,.0f} tokens/s, {entry['start_s']:.0f} s to "
        f"start, per rank {engine} for the engine and {rank} in total ({entry['version']})"
    )


def bench_rollout(
    config: ConfigFile,
    overrides: Overrides = None,
    engines: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Engines to measure; default: all installed engines."),
    ] = None,
    rounds: Annotated[
        int,
        typer.Option(min=1, help="Number of timed batches; each is as large as a step's batch."),
    ] = 3,
    world: World = None,
    as_json: Json = False,
) -> None:
    """Measure how many tokens per second each engine generates for a run, with initial weights."""
    refuse_other_job(world)

    def load(changed: Sequence[str]) -> tuple[Config, int]:
        found, _, world_size = laid_out(with_commits(load_config(config, changed)), world)
        return found, world_size

    given, names = overrides or [], measured_engines(engines)
    with json_only(as_json) as emit:
        if is_rank():
            measure_on_rank(lambda: load(given)[0], rounds)
            return
        arguments = [str(config), "--rounds", str(rounds)]
        report, code = measure(names, engines is not None, given, load, arguments)
        emit(report)
    raise typer.Exit(code)
