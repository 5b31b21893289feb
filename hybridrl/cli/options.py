"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML configuration.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Knobs set on top, e.g. train.tp=2."),
]
World = Annotated[
    int | None,
    typer.Option(min=1, help="Number of ranks; default: the GPUs, on CPU what the layout needs."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

# Of `check --mismatch`.
OfMismatch = Annotated[
    Path | None,
    typer.Option(metavar="CONFIG", help="Say instead why engine and trainer of a run differ."),
]
WithReference = Annotated[
    bool,
    typer.Option(help="With --mismatch: against transformers' own forward in float32, too."),
]
AgainstEngine = Annotated[
    str | None,
    typer.Option(metavar="ENGINE", help="With --mismatch: compare with this engine, too."),
]
