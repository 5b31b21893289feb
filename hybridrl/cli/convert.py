"""`hybridrl convert`: converts weights between HF directories and Megatron checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hybridrl.checkpoint.folders import FileFormat
from hybridrl.loop.preflight import validate_conversion
from hybridrl.services.launch.local_ranks import is_rank, launch_without_run


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="HF directory, checkpoint or run folder.")
    ],
    target: Annotated[Path, typer.Argument(metavar="DST", help="Folder to write.")],
    to: Annotated[FileFormat, typer.Option(help="Format to write.")],
    tp: Annotated[int, typer.Option(min=1, help="Tensor parallel size of the conversion.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline parallel size of the conversion.")] = 1,
    family: Annotated[
        str | None, typer.Option(help="Value of model.family, if the family is your own.")
    ] = None,
    base: Annotated[
        Path | None,
        typer.Option(help="HF directory of the model from which training began, if it moved."),
    ] = None,
) -> None:
    """Convert weights between HF directories and Megatron checkpoints, and the LoRA adapters in a
    checkpoint to a PEFT directory (--to peft) or into an HF directory of merged weights (--to hf).
    """
    if is_rank():
        from hybridrl.loop.convert import convert_rank

        convert_rank(source, target, to, tp=tp, pp=pp, family=family, base=base)
        return
    validate_conversion(source, target, to, tp, pp, family, base)
    arguments = ["convert", str(source), str(target), "--to", to, "--tp", str(tp), "--pp", str(pp)]
    arguments += ["--family", family] if family else []
    arguments += ["--base", str(base)] if base is not None else []
    if (code := launch_without_run(arguments, tp * pp)) == 0:
        typer.echo(f"wrote {target}")
    raise typer.Exit(code)
