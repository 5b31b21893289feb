"""The command line. No torch in the parent: ranks import heavy modules, inside the commands.

Owns commands, exit codes and what is printed. Exit codes: 0 done; 2 the user's configuration or
data is wrong (one message, no traceback); 130 and 143 stopped by SIGINT and SIGTERM; 1 anything
else. With --json stdout is one JSON object.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from hybridrl import __version__, console
from hybridrl.checkpoint.folders import FileFormat
from hybridrl.cli import options, starting
from hybridrl.cli.cluster import (
    InAllocation,
    NodesFile,
    OfCluster,
    OfRay,
    RunsFolder,
    Ssh,
    launch_command,
)
from hybridrl.cli.launch import (
    STOP_CODES,
    die_with_launcher,
    is_rank,
    launch_without_run,
)
from hybridrl.cli.leaving import wait_for_gate
from hybridrl.cli.options import ConfigFile, Json, Overrides, World
from hybridrl.cli.pinning import laid_out, with_commits
from hybridrl.cli.rank_log import log_to, write_stacks_on_signal
from hybridrl.cli.training import launch_training
from hybridrl.config.identity import run_folder
from hybridrl.config.load import load_config
from hybridrl.config.own_code import contained, make_working_folder_importable
from hybridrl.config.rules import default_world_size
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, UserError
from hybridrl.loop.preflight import (
    validate_conversion,
    validate_evaluation,
    validate_replay,
    validate_training,
)
from hybridrl.parallel import failure
from hybridrl.parallel.failure import is_launched
from hybridrl.parallel.host_gpus import num_local_gpus


class Commands(TyperGroup):
    """The commands, none of which ends by another's sys.exit."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        with contained():
            return super().invoke(ctx)


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)
app.command()(starting.init)
app.command()(starting.examples)

bench = typer.Typer(no_args_is_help=True, help="Measure parts of a run on this host.")
app.add_typer(bench, name="bench")
app.command("launch")(launch_command)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"hybridrl {__version__}")
        raise typer.Exit(0)


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Post-trains large language models with reinforcement learning."""


@app.command()
def check(
    overrides: Overrides = None,
    mismatch: options.OfMismatch = None,
    reference: options.WithReference = False,
    against: options.AgainstEngine = None,
    cluster: OfCluster = False,
    hostfile: NodesFile = None,
    slurm: InAllocation = False,
    ray: OfRay = None,
    ssh: Ssh = "ssh",
    run_dir: RunsFolder = Path("runs"),
    world: World = None,
    as_json: Json = False,
) -> None:
    """Report what is installed and works, with the command that mends each problem."""
    from hybridrl.cli import cluster_check, environment

    if cluster:
        raise typer.Exit(cluster_check.command(hostfile, slurm, ray, ssh, run_dir, as_json))
    if mismatch is not None:
        _check_mismatch(mismatch, overrides or [], world, reference, against, as_json)
    cluster_check.refuse_without_cluster(hostfile, slurm, ray)
    for name, given in (("KEY=VALUE", " ".join(overrides or ())), ("--against", against)):
        if given:
            raise UserError(name, given, "nothing without --mismatch CONFIG", "Add it.")
    with _json_only(as_json) as emit:
        items = environment.inspect()
        report = environment.as_json(items)
        emit(report)
    if not as_json:
        for item in items:
            typer.echo(f"{item.status:8} {item.name:20} {item.found}")
            if item.fix:
                typer.echo(f"{'':8} fix: {item.fix}")
    raise typer.Exit(0 if report["ok"] else 1)


@app.command()
def plan(
    config: ConfigFile,
    overrides: Overrides = None,
    world: World = None,
    cluster: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="YAML or JSON of what the cluster is, all keys optional; or 8x8xH200.",
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Print the ten best layouts, and why others lost.")
    ] = False,
    all_ranks: Annotated[
        bool, typer.Option("--all", help="List every rank and what is assumed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say whether a run fits, its layouts, reshard and memory; needs no GPU and no weights."""
    from hybridrl.cli.plan import run_plan, run_search

    with _json_only(as_json) as emit:
        run = run_search if search else run_plan
        text, violations = run(config, overrides or [], world, cluster, emit, all_ranks)
    if violations:
        raise ConfigError(violations)
    if not as_json:
        typer.echo(text)


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    world: World = None,
    replay: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Only say why the step of this saved batch was skipped."),
    ] = None,
    resume: Annotated[
        Literal["newest", "previous"],
        typer.Option(help="Checkpoint to go on from; previous: the newest whole one before it."),
    ] = "newest",
) -> None:
    """Train; continues from the newest checkpoint in the run folder."""
    _refuse_other_job(world)
    loaded = with_commits(load_config(config, overrides or []))
    if replay is not None:
        _replay(loaded, config, overrides or [], world, replay)
    if is_rank():
        console.protect(console.STDOUT)  # a run's result is its folder, not what it prints
        if not is_launched():
            validate_training(loaded, _torchrun_world(world), resume)
            log_to(run_folder(loaded) / "logs")
        from hybridrl.loop.run import train_rank

        wait_for_gate()
        raise typer.Exit(train_rank(loaded, resume))
    arguments = ["train", str(config), *(overrides or []), "--resume", resume]
    raise typer.Exit(launch_training(loaded, arguments, world, resume))


@app.command("eval")
def evaluate(
    config: Annotated[
        Path,
        typer.Argument(
            metavar="WHAT",
            help="YAML configuration, run folder, checkpoint folder or HF directory.",
        ),
    ],
    overrides: Overrides = None,
    world: World = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Checkpoint folder; default: the run's newest.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSONL file in place of data.eval_prompts.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy on the evaluation prompts and eval.sets, greedy unless eval.temperature=T
    (or rollout.temperature=T) is given; and the loss on held-out rows with responses.
    """
    from hybridrl.cli.eval import evaluated_config, template_warning, untrained_warning

    _refuse_other_job(world)
    given = overrides or []
    loaded, found = evaluated_config(config, given)
    if found is not None and checkpoint is not None:
        raise UserError("--checkpoint", checkpoint, "one checkpoint", f"{config} is one too.")
    checkpoint = checkpoint or found
    if prompts is not None:
        data = loaded.data.model_copy(update={"eval_prompts": (str(prompts),)})
        loaded = loaded.model_copy(update={"data": data})
    loaded = with_commits(loaded)
    files = loaded.data.eval_prompts if prompts else None
    if checkpoint is not None and not os.path.isdir(checkpoint):
        raise UserError("--checkpoint", checkpoint, "a checkpoint folder", "Check the path.")
    warning = None
    if checkpoint is None:
        warning = untrained_warning(loaded, config) or template_warning(loaded, config)
    if is_rank():
        if not is_launched():
            validate_evaluation(loaded, _torchrun_world(world), files, checkpoint)
            if warning and os.environ["RANK"] == "0":
                typer.echo(warning, err=True)
        _evaluate_rank(loaded, checkpoint, files, as_json)
        return
    world_size = world or default_world_size(loaded, num_local_gpus())
    loaded, laid = laid_out(loaded, world_size)
    validate_evaluation(loaded, world_size, files, checkpoint)
    if warning:
        typer.echo(warning, err=True)
    arguments = ["eval", str(config), *given, *laid]
    arguments += ["--checkpoint", str(checkpoint)] if checkpoint and not found else []
    arguments += ["--prompts", str(prompts)] if prompts else []
    arguments += ["--json"] if as_json else []
    raise typer.Exit(launch_without_run(arguments, world_size))


@bench.command("rollout")
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
    from hybridrl.cli import bench as measuring

    _refuse_other_job(world)

    def load(changed: Sequence[str]) -> tuple[Config, int]:
        found = with_commits(load_config(config, changed))
        world_size = world or default_world_size(found, num_local_gpus())
        return laid_out(found, world_size)[0], world_size

    given, names = overrides or [], measuring.measured_engines(engines)
    with _json_only(as_json) as emit:
        if is_rank():
            measuring.measure_on_rank(lambda: load(given)[0], rounds)
            return
        arguments = [str(config), "--rounds", str(rounds)]
        report, code = measuring.measure(names, engines is not None, given, load, arguments)
        emit(report)
    raise typer.Exit(code)


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="HF directory, checkpoint or run folder.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    to: Annotated[FileFormat, typer.Option(help="Format to write.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of the ranks.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallel size of the ranks.")] = 1,
    family: Annotated[
        str | None, typer.Option(help="As model.family, for a family of your own.")
    ] = None,
) -> None:
    """Convert weights between HF directories and Megatron checkpoints."""
    if is_rank():
        from hybridrl.loop.convert import convert_rank

        convert_rank(source, target, to, tp=tp, pp=pp, family=family)
        return
    validate_conversion(source, target, to, tp, pp, family)
    arguments = ["convert", str(source), str(target), "--to", to, "--tp", str(tp), "--pp", str(pp)]
    arguments += ["--family", family] if family else []
    if (code := launch_without_run(arguments, tp * pp)) == 0:
        typer.echo(f"wrote {target}")
    raise typer.Exit(code)


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="HF directory.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="organisation/name on the hub.")],
    private: Annotated[bool, typer.Option(help="Make it private, if it is made.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; default: main.")] = None,
) -> None:
    """Upload an HF directory to the hub; nothing else here uploads anything."""
    from hybridrl.cli.push import push as upload

    typer.echo(upload(folder, name, private, revision))


@app.command()
def report(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's folder.")],
    other_runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[OTHER_RUN]...", help="Runs to compare with.")
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Serve the page on loopback and follow the run.")
    ] = False,
    port: Annotated[int, typer.Option(help="With --live; 0: any that is free.")] = 0,
) -> None:
    """Write one HTML page about a run, or several: curves, samples, evaluations; print its path."""
    from hybridrl.cli.report import report_runs

    folders = [run_dir, *(other_runs or [])]
    report_runs(folders, port if live else None, typer.echo, lambda t: typer.echo(t, err=True))


@app.command()
def top(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    every_s: Annotated[float, typer.Option(min=0.1, help="Seconds between readings.")] = 2.0,
) -> None:
    """Show what a run is doing, until Ctrl-C; once where the output is no terminal."""
    from hybridrl.cli.top import watch

    watch(run_dir, every_s)


def main() -> None:
    """Runs the command line and ends the process with the command's exit code."""
    make_working_folder_importable()
    console.protect(console.STDERR)
    die_with_launcher()
    if is_rank():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while nothing can be saved
        write_stacks_on_signal()
        failure.begin()
        # What is absent says `hybridrl check`; a mistake's message must stand out.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        app()
    except SystemExit as end:  # of the command line's library, when the command is done
        failure.end()
        if is_rank() and end.code in STOP_CODES:
            _leave(int(end.code))
        raise
    except Exception as error:  # the last frame of a process: report, then end
        failure.report(failure.Failure.of(error))
        _leave(2 if isinstance(error, UserError) else 1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if is_rank():
        os._exit(
            code
        )  # an orderly exit would wait for collectives that the other ranks never enter
    sys.exit(code)


def _refuse_other_job(asked: int | None) -> None:
    """Refuses --world where the environment says that this is a rank of another job, before this
    process waits for the ranks of that one.
    """
    if is_rank() and not is_launched():
        _torchrun_world(asked)


def _torchrun_world(asked: int | None) -> int:
    """Returns the number of ranks, of which torchrun started this one.

    Raises:
        UserError: another number is asked for, or the variables are none of a rank.
    """
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    remedy = (
        "Under torchrun leave --world out; in the shell of another job `unset RANK WORLD_SIZE`."
    )
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        found, allowed = f"{rank!r} and {size!r}", "a rank below the number of ranks"
        raise UserError("RANK and WORLD_SIZE in the environment", found, allowed, remedy)
    if asked not in (None, int(size)):
        allowed = f"{size}, since RANK={rank} and WORLD_SIZE={size} are in the environment"
        raise UserError("--world", asked, allowed, remedy)
    return int(size)


def _evaluate_rank(
    config: Config, checkpoint: Path | None, prompts: Sequence[str] | None, as_json: bool
) -> None:
    from hybridrl.cli.eval import evaluation_text
    from hybridrl.loop.run import evaluate_rank

    with _json_only(as_json) as emit:
        result = evaluate_rank(config, checkpoint, prompts)
        if os.environ["RANK"] == "0":
            emit(result)
    if os.environ["RANK"] == "0" and not as_json:
        typer.echo(evaluation_text(result))


def _check_mismatch(
    file: Path,
    overrides: list[str],
    world: int | None,
    reference: bool,
    against: str | None,
    as_json: bool,
) -> NoReturn:
    """Runs `check --mismatch` as parent or as rank; ends the command with its exit code."""
    from hybridrl.cli import mismatch

    _refuse_other_job(world)

    def load(given: Sequence[str]) -> tuple[Config, int]:
        config = with_commits(load_config(file, given))
        mismatch.refuse_without_rollouts(config, "--mismatch")
        if is_launched():
            return config, 0
        of_torchrun = is_rank() and _torchrun_world(world)
        world_size = of_torchrun or world or default_world_size(config, num_local_gpus())
        config, _ = laid_out(config, world_size)
        validate_training(config, world_size)
        return config, world_size

    with _json_only(as_json) as emit:
        report: dict[str, Any] | int
        if is_rank():
            mismatch.refuse_under_torchrun(against)
            from hybridrl.debug.diagnose import diagnose_rank

            report = diagnose_rank(load(overrides)[0], reference)
            if os.environ["RANK"] != "0" or mismatch.leave_for_parent(report):
                raise typer.Exit(0 if is_launched() else 1 - report["agree"])
        else:
            options = ["--reference"] * reference + ["--json"] * as_json
            report = mismatch.diagnose(load, file, overrides, options, against)
            if isinstance(report, int):
                raise typer.Exit(report)
        emit(report)
    if not as_json:
        typer.echo(mismatch.mismatch_text(report))
    raise typer.Exit(0 if report["agree"] else 1)


def _replay(
    config: Config, file: Path, overrides: list[str], world: int | None, saved: Path
) -> NoReturn:
    """Runs `train --replay` as parent or as rank; ends the command with its exit code."""
    from hybridrl.cli.mismatch import leave_for_parent, report_of_ranks
    from hybridrl.cli.replay import refuse_missing, replay_text

    refuse_missing(saved)
    report: dict[str, Any] | int
    if is_rank():
        if not is_launched():
            validate_replay(config, _torchrun_world(world))
        from hybridrl.debug.step_replay import replay_rank

        report = replay_rank(config, saved)
        if os.environ["RANK"] != "0" or leave_for_parent(report):
            raise typer.Exit(0 if is_launched() else 1 - report["is_finite"])
    else:
        world_size = world or default_world_size(config, num_local_gpus())
        config, laid = laid_out(config, world_size)
        validate_replay(config, world_size)
        arguments = ["train", str(file), *overrides, *laid, "--replay", str(saved)]
        report = report_of_ranks(arguments, world_size)
        if isinstance(report, int):
            raise typer.Exit(report)
    typer.echo(replay_text(report))
    raise typer.Exit(0 if report["is_finite"] else 1)


@contextmanager
def _json_only(is_wanted: bool) -> Iterator[Callable[[object], None]]:
    """Gives a function that prints a JSON object; what else is written to stdout goes to stderr.

    Works on the file descriptor, so that C libraries are caught too. Where JSON is not
    wanted nothing is redirected and the function does nothing.
    """
    if not is_wanted:
        yield lambda content: None
        return
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        yield lambda content: _write_all(real, json.dumps(content) + "\n")
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)


def _write_all(descriptor: int, text: str) -> None:
    with os.fdopen(os.dup(descriptor), "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
