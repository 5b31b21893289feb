"""The command line. No torch in the parent: ranks import heavy modules, inside the commands.

Exit codes: 0 done; 2 the user's configuration or data is wrong (one message, no traceback); 130 and
143 stopped by SIGINT and SIGTERM; 1 anything else. With --json stdout is one JSON object.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hybridrl import __version__, console
from hybridrl.cli import bench, check, convert, eval, init, launch, plan, push, report, top, train
from hybridrl.config.own_code import contained, make_working_folder_importable
from hybridrl.errors import UserError
from hybridrl.parallel import failure
from hybridrl.parallel.watch import observe_hangs
from hybridrl.services.launch.local_ranks import STOP_CODES, die_with_launcher, is_rank
from hybridrl.services.launch.rank_log import write_stacks_on_signal
from hybridrl.services.liveness.hang_reports import HangReports


class Commands(TyperGroup):
    """The commands, none of which ends by another's sys.exit."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command."""
        with contained():
            return super().invoke(ctx)


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)
benches = typer.Typer(no_args_is_help=True, help="Measure parts of a run on this host.")
benches.command("rollout")(bench.bench_rollout)
app.command()(init.init)
app.command()(init.examples)
app.add_typer(benches, name="bench")
app.command("launch")(launch.launch_command)
app.command()(check.check)
app.command()(plan.plan)
app.command()(train.train)
app.command("eval")(eval.evaluate)
app.command()(convert.convert)
app.command()(push.push)
app.command()(report.report)
app.command()(top.top)


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


def main() -> None:
    """Runs the command line and ends the process with the command's exit code."""
    make_working_folder_importable()
    console.protect(console.STDERR)
    die_with_launcher()
    if is_rank():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback while nothing can be saved
        write_stacks_on_signal()
        observe_hangs(HangReports)
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


if __name__ == "__main__":
    main()
