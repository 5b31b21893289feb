"""The command line. The parent process does not import torch; only ranks import heavy modules.

Exit codes: 0 success; 2 invalid configuration or data (one message, no traceback); 130 and 143
stopped by SIGINT and SIGTERM; 1 any other failure. With --json, stdout is a single JSON object.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hybridrl import __version__, console
from hybridrl.cli import (
    bench,
    check,
    convert,
    eval,
    init,
    launch,
    plan,
    push,
    report,
    serve,
    top,
    train,
)
from hybridrl.config.own_code import contained, make_working_folder_importable
from hybridrl.errors import UserError
from hybridrl.parallel import failure
from hybridrl.parallel.watch import observe_hangs
from hybridrl.services.launch.local_ranks import STOP_CODES, die_with_launcher, is_rank
from hybridrl.services.launch.rank_log import write_stacks_on_signal
from hybridrl.services.liveness.hang_reports import HangReports


class Commands(TyperGroup):
    """Command group that turns a call of sys.exit in users' code into an error."""

    def invoke(self, ctx: Any) -> Any:
        with contained():
            return super().invoke(ctx)


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False)
benches = typer.Typer(no_args_is_help=True, help="Measure parts of a run on this host.")
benches.command("rollout")(bench.bench_rollout)
app.add_typer(benches, name="bench")
COMMANDS: dict[str, Callable[..., None]] = {
    "init": init.init,
    "examples": init.examples,
    "launch": launch.launch_command,
    "check": check.check,
    "plan": plan.plan,
    "train": train.train,
    "eval": eval.evaluate,
    "serve": serve.serve,
    "convert": convert.convert,
    "push": push.push,
    "report": report.report,
    "top": top.top,
}
for _name, _command in COMMANDS.items():
    _summary, *_ = (_command.__doc__ or "").partition("\n\n")
    # Without the source's line breaks, which typer keeps in the list of commands.
    app.command(_name, short_help=" ".join(_summary.split()))(_command)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"hybridrl {__version__}")
        raise typer.Exit(0)


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Post-trains large language models with reinforcement learning."""


def main() -> None:
    make_working_folder_importable()
    console.protect(console.STDERR)
    die_with_launcher()
    if is_rank():
        # Exit without a traceback until there is a state to save.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        write_stacks_on_signal()
        observe_hangs(HangReports)
        failure.begin()
        # Megatron's warnings about missing packages would bury the message about a mistake.
        warnings.filterwarnings("ignore", module=r"megatron\.")
        warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        app()
    except SystemExit as end:  # typer always exits this way
        # A terminal that closes while the interpreter exits must not change the exit code.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        failure.end()
        if is_rank() and end.code in STOP_CODES:
            _leave(int(end.code))
        raise
    except Exception as error:  # the process ends here: report and exit
        failure.report(failure.Failure.of(error))
        _leave(2 if isinstance(error, UserError) else 1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if is_rank():
        # A normal exit would wait for collectives that other ranks never enter.
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
