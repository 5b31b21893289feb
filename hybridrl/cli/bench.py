"""`hybridrl bench rollout`: how fast each installed engine generates for a run. No torch.

Owns which engines are measured and what is printed. Each engine has ranks of its own, started as
`train` starts them, one engine after another. Who waits for whom: as in check.py.
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
from hybridrl.config.rules import default_world_size
from hybridrl.config.schema import Config
from hybridrl.console import say
from hybridrl.errors import UserError
from hybridrl.loop.preflight import validate_training
from hybridrl.parallel.failure import is_launched, rank_file
from hybridrl.parallel.host_gpus import num_local_gpus
from hybridrl.rollout.registry import engine_package, offered_engines
from hybridrl.services.launch.local_ranks import is_rank
from hybridrl.services.launch.pinning import laid_out, with_commits
from hybridrl.services.launch.rank_reports import leave_for_parent, report_of_ranks
from hybridrl.services.planner.text import memory_size

Load = Callable[[Sequence[str]], tuple[Config, int]]
"""Returns the configuration with these overrides, and the number of ranks."""


def measured_engines(asked: str | None) -> list[str]:
    """Returns the engines to measure: those asked for, or all that are installed and compute.

    Args:
        asked: names, separated by commas; None: nothing is asked for.

    Raises:
        UserError: a name is that of no engine, or of one that computes nothing.
    """
    computing = offered_engines()
    if asked is None:
        packages = {name: engine_package(name) for name in computing}
        return [n for n, package in packages.items() if package is None or package.is_installed()]
    names = list(dict.fromkeys(name.strip() for name in asked.split(",")))
    for name in names:
        if name not in computing:
            allowed = f"some of {', '.join(computing)}, separated by commas"
            raise UserError("--engines", name, allowed, "Name engines that generate.")
    return names


def measure(
    names: Sequence[str],
    all_must: bool,
    overrides: Sequence[str],
    load: Load,
    arguments: Sequence[str],
) -> tuple[dict[str, Any], int]:
    """Measures engines one after another, telling of each on stdout as soon as it is done; of what
    is done before, the first rank tells on stderr.

    Args:
        names: of the engines.
        all_must: whether an engine that cannot generate for this run is an error; else it is told.
        overrides: the user's.
        load: reads the configuration.
        arguments: of the command that each rank runs, after its name: the file and the options.

    Returns:
        The report: what was measured, and `engines`, one entry for each; and the exit code: that of
        the first engine whose ranks failed, after which no other is measured.

    Raises:
        UserError: all must and one cannot, or none can.
    """
    # Of no run: another engine's folder would be refused, and nothing is written to it.
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
                print(f"{name:8} starts", flush=True)
                command = ["bench", "rollout", *arguments, *overrides, *changes[name]]
                measured = report_of_ranks(command, found[1])
                if isinstance(measured, int):
                    return report, measured
                entry = {"engine": name, "version": _version(name), **measured}
            report["engines"].append(entry)
            print(line(entry), flush=True)
    return report, 0


def measure_on_rank(load: Callable[[], Config], num_rounds: int) -> None:
    """Runs one rank of the measurement; rank 0 leaves the report for the parent.

    Args:
        load: reads the configuration.
        num_rounds: that are timed.

    Raises:
        UserError: there is no parent.
    """
    log = rank_file(".log")
    if log is None or not is_launched():
        raise UserError(
            "hybridrl bench rollout",
            "ranks of torchrun",
            "one process, which starts the ranks of one engine after another",
            "Run it without torchrun.",
        )
    started = time.monotonic()
    from hybridrl.loop.rollout_speed import measure_rank

    config, is_first = load(), os.environ["RANK"] == "0"

    def tell(text: str) -> None:
        if is_first:
            say(f"{config.rollout.engine:8} {text}")

    # What `train` tells of its start is not the answer here.
    with log.open("a", encoding="utf-8") as told, redirect_stdout(told):
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
    """Returns what all engines generate, and over how many ranks."""
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
    """Returns what all engines generate as a line for people."""
    engine = f"TP{sizes['tp']}" + (f" EP{sizes['ep']}" if sizes["ep"] > 1 else "")
    return (
        f"{sizes['prompts']} prompts x {sizes['samples_per_prompt']} responses, "
        f"{sizes['prompt_tokens']} + {sizes['new_tokens']} tokens each; "
        f"{sizes['world_size']} ranks, engines of {engine}"
    )


def line(entry: Mapping[str, Any]) -> str:
    """Returns what was found of one engine as a line for people."""
    if "refused" in entry:
        return f"{entry['engine']:8} not measured: {entry['refused']}"
    engine, rank = (memory_size(entry[key]) for key in ("engine_bytes", "rank_bytes"))
    return (
        f"{entry['engine']:8} {entry['tokens_per_s']:10,.0f} tokens/s, {entry['start_s']:.0f} s to "
        f"start, {engine} of the engine on a rank, {rank} in all ({entry['version']})"
    )


def bench_rollout(
    config: ConfigFile,
    overrides: Overrides = None,
    engines: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Engines to measure; default: all that are installed."),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Batches of a step that are timed.")] = 3,
    world: World = None,
    as_json: Json = False,
) -> None:
    """Measure how many tokens a second each engine generates for a run, with initial weights."""
    refuse_other_job(world)

    def load(changed: Sequence[str]) -> tuple[Config, int]:
        found = with_commits(load_config(config, changed))
        world_size = world or default_world_size(found, num_local_gpus())
        return laid_out(found, world_size)[0], world_size

    given, names = overrides or [], measured_engines(engines)
    with json_only(as_json) as emit:
        if is_rank():
            measure_on_rank(lambda: load(given)[0], rounds)
            return
        arguments = [str(config), "--rounds", str(rounds)]
        report, code = measure(names, engines is not None, given, load, arguments)
        emit(report)
    raise typer.Exit(code)
