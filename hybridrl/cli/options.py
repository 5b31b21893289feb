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
