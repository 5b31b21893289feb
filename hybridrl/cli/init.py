"""Writes configurations (`hybridrl init`) and examples; never overwrites existing files."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Annotated

import typer

import hybridrl
from hybridrl.config.hub import DATASET_FORM, DATASETS, MODEL_FORM, dataset_name, model_name
from hybridrl.config.schema import Config, ModelConfig
from hybridrl.config.source import read_model_config
from hybridrl.config.starter import (
    Start,
    has_no_weights,
    has_template,
    known_positions,
    local_config,
    starter_config,
    starter_text,
)
from hybridrl.config.wrapped_models import family_with_images, has_images
from hybridrl.data.forms import NAME_COLUMN
from hybridrl.errors import DataError, ModelError, UserError
from hybridrl.loop.row_checks import check_first_row
from hybridrl.models.family import read_model
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.host_gpus import num_local_gpus
from hybridrl.rewards.functions import REWARDS
from hybridrl.rollout.registry import ENGINES, offered_engines, usual_engine

ROW_FILES = (".jsonl", ".parquet")


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
    _check_model("MODEL", model)
    if teacher is not None:
        _check_model("--teacher", teacher)
    _check_source(prompts)
    if reward is not None:
        _check_reward(reward)
    used = engine or usual_engine(num_local_gpus() > 0)
    if used not in ENGINES:
        remedy = "`hybridrl check` lists the installed engines."
        raise UserError("--engine", used, ", ".join(offered_engines()), remedy)
    is_chat, content = has_template(model) if chat is None else chat, local_config(model)
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
        reads_images=has_images(content),
        num_parameters=known_parameters(model),
    )
    config, family = starter_config(start), family_with_images(content)
    if not prompts.startswith(DATASETS):
        # Nothing is known about the config.json of a hub name.
        may_have_images = start.reads_images or family is not None or not content
        if _check_rows(config, may_have_images) and family is not None:
            num_parameters = known_parameters(model, family)
            start = replace(start, family=family, reads_images=True, num_parameters=num_parameters)
    text = starter_text(start)
    file = output or Path(f"{task}.yaml")
    _refuse_existing(file, "pass another path with --output")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    typer.echo(f"wrote {file}\nnext: hybridrl plan {file}\n      hybridrl train {file}")
    if family is not None and start.family is None:
        typer.echo(
            f"{model} is trained as a text model. To train the model that reads images too: "
            f"model.family={family} (docs/guides/images.md)"
        )


def known_parameters(model: str, family: str | None = None) -> int | None:
    """Returns the parameters of a local model; None for a hub name or an unsupported model."""
    if not Path(model).expanduser().is_dir():
        return None
    try:
        content = read_model_config(ModelConfig(init=model, family=family))
        found, shape = read_model(family, content)
    except ModelError:  # the fault is reported when the model is used
        return None
    return sum(map(prod, hf_shapes(found, shape).values()))


def _check_model(name: str, model: str) -> None:
    folder = Path(model).expanduser()
    if folder.is_file():
        remedy = "Pass its folder; to start from random weights, set model.init."
        raise UserError(name, model, "an HF directory or a hub name", remedy)
    if folder.is_dir() and not (folder / "config.json").is_file():
        remedy = "Correct the path, or export a run with `hybridrl convert RUN OUT --to hf`."
        raise UserError(name, f"{model} (no config.json in it)", MODEL_FORM, remedy)
    if not folder.is_dir() and model_name(model) is None:
        raise UserError(name, f"{model} (no such folder)", MODEL_FORM, "Correct the path.")


def _check_source(source: str) -> None:
    if source.startswith(DATASETS):
        if dataset_name(source) is None:
            raise UserError("--prompts", source, DATASET_FORM, "Correct the name.")
        return
    path = Path(source)
    if path.exists():
        return
    files = [file.name for file in path.parent.glob("*") if file.suffix in ROW_FILES]
    near = get_close_matches(path.name, files, n=1, cutoff=0.5) or sorted(files)[:1]
    remedy = f"Did you mean {str(path.parent / near[0])!r}?" if near else "Correct the path."
    allowed = f"a JSONL or parquet file or a data set's folder that exists, or {DATASET_FORM}"
    raise UserError("--prompts", f"{source} (no such file)", allowed, remedy)


def _check_rows(config: Config, may_have_images: bool) -> bool:
    """Returns whether rows of a local source have images. Raises DataError if it has no row that
    the task can use.
    """
    needs = config.algorithm.needs
    assert needs is not None  # None only for a user's own algorithm
    try:
        return check_first_row(config, needs, may_have_images)
    except DataError as error:
        others = (
            "Rename or add columns. Or pass other rows that have them, and set data.prompts and "
            "the names of your columns (data.*_key) in the file that is written."
        )
        remedy = error.remedy.replace(NAME_COLUMN, others)
        raise DataError(error.name, error.value, error.allowed, remedy) from error


def _check_reward(name: str) -> None:
    """Raises UserError for an unknown name. Your own function need not exist yet."""
    if ":" not in name and name not in REWARDS:
        near = get_close_matches(name, REWARDS, n=1)
        remedy = f"Did you mean {near[0]!r}?" if near else "Check the name."
        allowed = f"{', '.join(REWARDS)} or module:function"
        raise UserError("--reward", name, allowed, remedy)


def examples(
    target: Annotated[
        Path, typer.Argument(metavar="[DST]", help="Folder to write `examples` into.")
    ] = Path("."),
) -> None:
    """Copy the examples into DST/examples; run them in DST, because their paths are
    relative to it.
    """
    folder = target / "examples"
    _refuse_existing(folder, "pass another folder as DST")
    shutil.copytree(
        examples_folder(), folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
    )
    typer.echo(f"wrote {folder}")


def examples_folder() -> Path:
    """Returns the folder of examples: inside a wheel's package, next to it in a checkout."""
    package = Path(hybridrl.__file__).parent
    installed = package / "examples"
    return installed if installed.is_dir() else package.parent / "examples"


def _refuse_existing(path: Path, remedy: str) -> None:
    if os.path.lexists(path):
        found = "an existing folder" if path.is_dir() else "an existing file"
        raise UserError(str(path), found, "a path that does not exist", f"Remove it, or {remedy}.")
