"""Commands `hybridrl init`, which writes a configuration, and `hybridrl examples`, which copies the
examples.

Invariant: existing files are never overwritten.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

import hybridrl
from hybridrl.config.starter import (
    Start,
    has_no_weights,
    has_template,
    known_positions,
    starter_text,
)
from hybridrl.errors import UserError
from hybridrl.parallel.host_gpus import num_local_gpus
from hybridrl.rollout.registry import ENGINES, offered_engines, usual_engine


def init(
    task: Annotated[
        str, typer.Argument(metavar="TASK", help="An algorithm: grpo, ppo, sft, dpo, ...")
    ],
    model: Annotated[str, typer.Argument(metavar="MODEL", help="HF directory or hub name.")],
    prompts: Annotated[
        str, typer.Option(metavar="SOURCE", help="JSONL or parquet file, or datasets:NAME:SPLIT.")
    ] = "train.jsonl",
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write; default: TASK.yaml.")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Inference engine; default: vllm with a GPU, else hf."),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Teacher, for distillation.")
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of a reward, or module:function for your own."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the run; default: MODEL-TASK.")
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--no-chat",
            help="Whether to apply the chat template to prompts; default: if the model has one.",
        ),
    ] = None,
) -> None:
    """Write a commented starter configuration for a model and a task."""
    if Path(model).is_file():
        remedy = "Pass its folder; to start from random weights, set model.init."
        raise UserError("MODEL", model, "an HF directory or a hub name", remedy)
    used = engine or usual_engine(num_local_gpus() > 0)
    if used not in ENGINES:
        remedy = "`hybridrl check` lists the installed engines."
        raise UserError("--engine", used, ", ".join(offered_engines()), remedy)
    is_chat = has_template(model) if chat is None else chat
    start = Start(
        task=task,
        model=model,
        prompts=prompts,
        engine=used,
        name=name,
        teacher=teacher,
        chat=is_chat,
        positions=known_positions(model),
        reward=reward,
        is_fresh=has_no_weights(model),
    )
    text = starter_text(start)
    file = output or Path(f"{task}.yaml")
    _refuse_existing(file, "--output")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {file}\nnext: hybridrl plan {file}\n      hybridrl train {file}")


def examples(
    target: Annotated[
        Path, typer.Argument(metavar="[DST]", help="Folder to write `examples` into.")
    ] = Path("."),
) -> None:
    """Copy the examples into DST/examples; run them in DST, because their paths are
    relative to it.
    """
    folder = target / "examples"
    _refuse_existing(folder, "DST")
    shutil.copytree(
        examples_folder(), folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    typer.echo(f"wrote {folder}")


def examples_folder() -> Path:
    """Returns the folder of examples: inside the package if installed from a wheel, next to it in a
    checkout.
    """
    package = Path(hybridrl.__file__).parent
    installed = package / "examples"
    return installed if installed.is_dir() else package.parent / "examples"


def _refuse_existing(path: Path, name: str) -> None:
    if os.path.lexists(path):
        raise UserError(
            name, path, "a path that does not exist", "Remove it, or choose another path."
        )
