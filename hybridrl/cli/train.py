"""`hybridrl train`, and `hybridrl train --replay`, which explains a skipped step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from hybridrl import console
from hybridrl.cli.options import ConfigFile, Overrides, World, refuse_other_job, torchrun_world
from hybridrl.config.identity import run_folder
from hybridrl.config.load import load_config
from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.loop.preflight import validate_replay, validate_training
from hybridrl.parallel.failure import is_launched
from hybridrl.services.launch.leaving import wait_for_gate
from hybridrl.services.launch.local_ranks import (
    is_rank,
    launch_run,
    leave_for_parent,
    report_of_ranks,
)
from hybridrl.services.launch.pinning import fits_on, laid_out, with_commits
from hybridrl.services.launch.rank_log import log_to
from hybridrl.services.launch.restarts import ElasticLaunch, LocalJob

PROMPT_CHARACTERS = 60


def replay_text(report: dict[str, Any]) -> str:
    weights = report["checkpoint"] or "the initial weights"
    counts = {"steps": report["num_steps_between"], "optimizer steps": report["update"]}
    ages = [f"{count} {what}" for what, count in counts.items() if count]
    older = f"{' and '.join(ages)} older than the skipped step's"
    how = older if ages else "exactly the skipped step's"
    lines = [
        f"step {report['step']}, optimizer step {report['update']}, skipped in the run because "
        f"{report['saved_reason']}",
        f"weights: {weights}, {how}",
    ]
    if report["changed"]:
        lines.append(f"changed since the run: {', '.join(report['changed'])}")
    for name in report.get("terms_left_out", ()):
        lines.append(f"left out: the loss term {name}, which the configuration no longer has")
    if not report["has_random_states"]:
        lines.append(
            "random states: not restored, because the run had another number of ranks or "
            "another device"
        )
    for name, model in report["models"].items():
        norm = f"gradient norm {model['grad_norm']:.6g}"
        if "loss_of" in model:
            norm = f"a term of the {model['loss_of']}'s loss, included in its gradient norm"
        lines.append(f"{name}: loss {model['loss']:.6g}, {norm}")
        for micro in model["micro_batches"]:
            mark = "  <- not finite" if micro["is_bad"] else ""
            lines.append(
                f"  rank {micro['rank']} micro-batch {micro['micro_batch']}: loss "
                f"{micro['loss']:.6g}, {len(micro['rows'])} rows{mark}"
            )
        if model["parameter"] and "loss_of" not in model:
            lines.append(f"  first parameter with a non-finite gradient: {model['parameter']}")
        for row in model["rows"]:
            lines.append(
                f"  row {row['row']} (sample {row['sample']}, {row['num_prompt_tokens']} + "
                f"{row['num_response_tokens']} tokens, reward {row['reward']:.6g}): loss "
                f"{row['loss']:.6g}, gradient norm {row['grad_norm']:.6g}; prompt "
                f"{row['prompt'][:PROMPT_CHARACTERS]!r}"
            )
    if report["is_finite"]:
        lines.append("finite: with these weights and knobs this batch would not be skipped")
    else:
        lines.append(f"not finite again: {report['cause']}")
        if not any(model["rows"] for model in report["models"].values()):
            lines.append("no single row is the cause")
    return "\n".join(lines)


def train(
    config: ConfigFile,
    overrides: Overrides = None,
    world: World = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Do not train; explain why the step with this saved batch was skipped.",
        ),
    ] = None,
    resume: Annotated[
        Literal["newest", "previous"],
        typer.Option(
            help="Checkpoint to continue from; previous: the newest complete one before the newest."
        ),
    ] = "newest",
) -> None:
    """Train, continuing from the newest checkpoint if the run folder has one."""
    refuse_other_job(world)
    loaded = with_commits(load_config(config, overrides or []))
    if replay is not None:
        _replay(loaded, config, overrides or [], world, replay)
    if is_rank():
        # A run's result is in its folder, so lost output is not an error.
        console.protect(console.STDOUT)
        if not is_launched():
            validate_training(loaded, torchrun_world(world), resume)
            log_to(run_folder(loaded) / "logs")
        from hybridrl.loop.run import train_rank

        wait_for_gate()
        raise typer.Exit(train_rank(loaded, resume))
    arguments = ["train", str(config), *(overrides or []), "--resume", resume]
    raise typer.Exit(_launch(loaded, arguments, world, resume))


def _launch(
    config: Config,
    arguments: Sequence[str],
    world_size: int | None,
    resume: Literal["newest", "previous"],
) -> int:
    found, laid, size = laid_out(config, world_size)
    validate_training(found, size, resume)
    folder, restarts = run_folder(found), found.run.max_restarts
    if not restarts:
        return launch_run([*arguments, *laid], size, folder)
    # The ranks choose the layout themselves, because a restart may have fewer ranks.
    again = ElasticLaunch(restarts, LocalJob(size, lambda fewer: fits_on(config, fewer)))
    return launch_run(arguments, size, folder, again)


def _replay(
    config: Config, file: Path, overrides: list[str], world: int | None, saved: Path
) -> NoReturn:
    if not os.path.isfile(saved):
        allowed = "an existing file in a run's replay folder"
        raise UserError("--replay", saved, allowed, "Correct the path.")
    report: dict[str, Any] | int
    if is_rank():
        if not is_launched():
            validate_replay(config, torchrun_world(world))
        from hybridrl.debug.step_replay import replay_rank

        report = replay_rank(config, saved)
        if os.environ["RANK"] != "0" or leave_for_parent(report):
            raise typer.Exit(0 if is_launched() else 1 - report["is_finite"])
    else:
        config, laid, world_size = laid_out(config, world)
        validate_replay(config, world_size)
        arguments = ["train", str(file), *overrides, *laid, "--replay", str(saved)]
        report = report_of_ranks(arguments, world_size)
        if isinstance(report, int):
            raise typer.Exit(report)
    typer.echo(replay_text(report))
    raise typer.Exit(0 if report["is_finite"] else 1)
