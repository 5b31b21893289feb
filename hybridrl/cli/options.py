"""Options and helpers that several commands share."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from hybridrl.errors import UserError
from hybridrl.parallel.failure import is_launched
from hybridrl.services.launch.local_ranks import is_rank

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration.")]
ModelSource = Annotated[
    Path,
    typer.Argument(
        metavar="WHAT",
        help="YAML configuration, run folder, checkpoint folder, HF or PEFT directory.",
    ),
]
CheckpointFolder = Annotated[
    Path | None, typer.Option(help="Checkpoint folder; default: the run's newest checkpoint.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...", help="Knobs that override the file, for example train.tp=2."
    ),
]
World = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of ranks; default: one per GPU, or on CPU as many as the layout needs."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout.")]

Ssh = Annotated[str, typer.Option(help="SSH program for --hostfile, with its options.")]

# Options of `check --mismatch`.
OfMismatch = Annotated[
    Path | None,
    typer.Option(
        metavar="CONFIG", help="Instead, find out why a run's engine and trainer disagree."
    ),
]
WithReference = Annotated[
    bool, typer.Option(help="With --mismatch: also compare with transformers in float32.")
]
AgainstEngine = Annotated[
    str | None,
    typer.Option(metavar="ENGINE", help="With --mismatch: also compare with this engine."),
]

# Options of `check --cluster`.
OfCluster = Annotated[
    bool, typer.Option("--cluster", help="Instead, check nodes, their links and shared files.")
]
NodesFile = Annotated[
    Path | None,
    typer.Option("--hostfile", metavar="FILE", help="With --cluster: file that lists the hosts."),
]
InAllocation = Annotated[
    bool, typer.Option("--slurm", help="With --cluster: check the nodes of this allocation.")
]
OfRay = Annotated[
    str | None,
    typer.Option(
        "--ray", metavar="ADDRESS", help="With --cluster: check the nodes of a Ray cluster."
    ),
]
RunsFolder = Annotated[
    Path, typer.Option(metavar="DIR", help="With --cluster: folder that contains the run folders.")
]


def refuse_other_job(asked: int | None) -> None:
    """Refuses --world in a rank of another job, for whose ranks this process would wait."""
    if is_rank() and not is_launched():
        torchrun_world(asked)


def torchrun_world(asked: int | None) -> int:
    """Returns the number of ranks that torchrun started; raises UserError if --world differs."""
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    remedy = "Under torchrun, remove --world; in another job's shell, run `unset RANK WORLD_SIZE`."
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        found, allowed = f"{rank!r} and {size!r}", "numbers, with RANK below WORLD_SIZE"
        raise UserError("RANK and WORLD_SIZE in the environment", found, allowed, remedy)
    if asked not in (None, int(size)):
        allowed = f"{size}, because the environment has RANK={rank} and WORLD_SIZE={size}"
        raise UserError("--world", asked, allowed, remedy)
    return int(size)


@contextmanager
def json_only(is_wanted: bool) -> Iterator[Callable[[object], None]]:
    """Yields a function that prints a JSON object; all other output to stdout goes to stderr.

    Redirects the file descriptor, so that C libraries follow. Does nothing without JSON.
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
