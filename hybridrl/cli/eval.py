"""`hybridrl eval`: chooses the model to evaluate, and prints the result."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridrl.checkpoint.folders import STEP_FOLDER, newest_checkpoint
from hybridrl.checkpoint.manifest import MANIFEST
from hybridrl.cli.options import (
    CheckpointFolder,
    Json,
    ModelSource,
    Overrides,
    World,
    json_only,
    refuse_other_job,
    torchrun_world,
)
from hybridrl.config.identity import run_folder
from hybridrl.config.load import load_config, load_config_dict
from hybridrl.config.schema import Config
from hybridrl.config.starter import has_template
from hybridrl.errors import UserError
from hybridrl.loop.preflight import validate_evaluation
from hybridrl.metrics.estimates import Estimate
from hybridrl.models.adapters.peft_directory import CONFIG_FILE as ADAPTER_FILE
from hybridrl.models.adapters.peft_directory import is_peft, read_base_name
from hybridrl.models.hf.directory import CONFIG_FILE
from hybridrl.parallel.failure import is_launched
from hybridrl.services.launch.local_ranks import is_rank, launch_without_run
from hybridrl.services.launch.pinning import laid_out, with_commits

TEMPERATURE = "rollout.temperature="
RUN_CONFIG = "config.yaml"  # in a run folder
CHECKPOINTS = "checkpoints"
TOKENIZER_FILE = "tokenizer.json"
OWN = "held-out prompts"
COLUMNS = ("", "prompts", "samples", "accuracy")
SOURCES = (
    f"a YAML configuration; the folder of a run ({RUN_CONFIG}), or one of its checkpoints; "
    f"an HF directory ({CONFIG_FILE}); or a PEFT directory ({ADAPTER_FILE})"
)


def evaluated_config(
    source: Path, overrides: Sequence[str], checkpoint: Path | None = None
) -> tuple[Config, Path | None]:
    """Returns the configuration, and `checkpoint`, or else `source` if it is a checkpoint.

    `rollout.temperature` in the overrides is used as `eval.temperature`.

    Raises:
        UserError: `source` is not a YAML file, run folder, checkpoint, or HF or PEFT directory.
    """
    own = None
    if not os.path.exists(source):
        raise UserError(str(source), "no such file or folder", SOURCES, "Correct the path.")
    if not os.path.isdir(source):
        config = load_config(source, overrides)
    elif os.path.isfile(source / CONFIG_FILE):
        config = load_config_dict({"model": {"path": str(source)}, **_as_run(source)}, overrides)
    elif is_peft(source):
        config = _config_of_adapter(source, overrides)
    elif os.path.isfile(source / RUN_CONFIG):
        config = _config_of_run(source, overrides)
    elif STEP_FOLDER.fullmatch(source.name) or os.path.isfile(source / MANIFEST):
        run, own = Path(os.path.abspath(source)).parent.parent, source
        if not os.path.isfile(run / RUN_CONFIG):
            found = f"a checkpoint without its run: {run / RUN_CONFIG} does not exist"
            remedy = "Pass the run's configuration, and this folder with --checkpoint."
            raise UserError(str(source), found, "a checkpoint inside its run folder", remedy)
        config = _config_of_run(run, overrides)
    elif source.name == CHECKPOINTS and os.path.isfile(source.absolute().parent / RUN_CONFIG):
        config = _config_of_run(source.absolute().parent, overrides)
    else:
        raise UserError(
            str(source),
            f"a folder without {RUN_CONFIG}, {CONFIG_FILE} or {ADAPTER_FILE}",
            SOURCES,
            "To evaluate a run before training, pass its configuration.",
        )
    if any(override.startswith(TEMPERATURE) for override in overrides):
        section = config.eval.model_copy(update={"temperature": config.rollout.temperature})
        config = config.model_copy(update={"eval": section})
    if own is not None and checkpoint is not None:
        remedy = f"Remove it, because {source} already is a checkpoint."
        raise UserError("--checkpoint", checkpoint, "one checkpoint", remedy)
    if checkpoint is not None and not os.path.isdir(checkpoint):
        raise UserError("--checkpoint", checkpoint, "a checkpoint folder", "Correct the path.")
    return config, checkpoint or own


def _as_run(source: Path) -> dict[str, Any]:
    # A configuration needs a run's name and folder, although an evaluation writes nothing.
    return {"run": {"name": "evaluation", "dir": str(source)}, "algorithm": {"name": "sft"}}


def _config_of_adapter(source: Path, overrides: Sequence[str]) -> Config:
    """Returns a PEFT directory's configuration, by default with the base model that it names."""
    base = read_base_name(source)
    model = {"path": base} if base else {}
    if os.path.isfile(source / TOKENIZER_FILE):
        model["tokenizer"] = str(source)
    content = {"model": model, "lora": {"path": str(source)}, **_as_run(source)}
    config = load_config_dict(content, overrides)
    if config.model.path is None and config.model.init is None:
        found = "nothing"
        allowed = "the model that the adapters were trained on"
        remedy = "Add model.path=MODEL."
        raise UserError(f"{source / ADAPTER_FILE}: base_model_name_or_path", found, allowed, remedy)
    return config


def _config_of_run(folder: Path, overrides: Sequence[str]) -> Config:
    whole = Path(os.path.abspath(folder))
    config = load_config(folder / RUN_CONFIG, overrides, is_saved=True)
    run = config.run.model_copy(update={"dir": str(_shown_path(whole.parent)), "name": whole.name})
    return config.model_copy(update={"run": run})


def _shown_path(path: Path) -> Path:
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def untrained_warning(config: Config, source: Path) -> str | None:
    """Returns a warning if the base model is evaluated because a run has no checkpoint."""
    folder = run_folder(config)
    if str(source) == config.run.dir and (os.path.isfile(source / CONFIG_FILE) or is_peft(source)):
        return None
    if newest_checkpoint(folder / CHECKPOINTS) is not None:
        return None
    base = config.model.path
    model = f"the base model {base}" if base else f"{config.model.init} with initial weights"
    return (
        f"WARNING: {folder} has no checkpoint, so {model} is evaluated, without any training. "
        "Train the run first, or pass a checkpoint with --checkpoint."
    )


def template_warning(config: Config, source: Path) -> str | None:
    """Returns a warning if texts are evaluated without the model's chat template by default."""
    is_set = "chat_template" in config.data.model_fields_set
    is_model = os.path.isfile(source / CONFIG_FILE) or is_peft(source)
    if is_set or not is_model or not has_template(str(source)):
        return None
    return (
        f"WARNING: {source} has a chat template, but text prompts are evaluated without it. "
        "For a chat model add data.chat_template=true, otherwise data.chat_template=false."
    )


def evaluation_text(result: Mapping[str, Any]) -> str:
    """Formats a result of `evaluate_rank` as text: accuracy, loss, and a table of sets if any."""
    lines = list(_own_lines(result)) if result["num_prompts"] else []
    if result["validation"]:
        shown = (f"{name} {value:.4f}" for name, value in result["validation"].items())
        lines.append(f"held-out rows with responses: {', '.join(shown)}")
    if result["sets"] or result["samples_per_prompt"] > 1:
        lines += _table(result)
    if result["checkpoint"] is None:
        adapter = result.get("adapter")
        model = result["model"] if adapter is None else f"{result['model']} with {adapter}"
        lines.append(f"model {model}, no checkpoint")
    else:
        lines.append(f"checkpoint {result['checkpoint']}")
    return "\n".join(lines)


def _own_lines(result: Mapping[str, Any]) -> Iterator[str]:
    if result["accuracy"] is not None:
        estimate = Estimate(result["accuracy"], result["accuracy_stderr"])
        yield f"accuracy {estimate} on {result['num_prompts']} prompts"
    else:
        yield f"no accuracy: {result['note']}"
    accuracy, reward = result["accuracy"], result["reward"]
    # The means are float32, so they may differ slightly.
    if accuracy is None or not math.isclose(accuracy, reward, rel_tol=1e-6):
        parts = ", ".join(f"{name} {score:.4f}" for name, score in result["scores"].items())
        yield f"reward {result['reward']:.4f} ({parts})"
    num_responses = result["num_prompts"] * result["samples_per_prompt"]
    if result["num_scored"] < num_responses:
        yield f"{result['num_scored']} of {num_responses} responses have a score"


def _table(result: Mapping[str, Any]) -> Iterator[str]:
    own = {OWN: result} if result["num_prompts"] else {}
    sets: dict[str, Mapping[str, Any]] = {**own, **result["sets"]}
    ks = sorted({int(k) for one in sets.values() for k in one["pass_at"]})
    has_majority = any(one["majority"] is not None for one in sets.values())
    head = [*COLUMNS, *(f"pass@{k}" for k in ks), *["majority"] * has_majority, "failed"]
    rows = [head]
    for name, one in sets.items():
        accuracy = one["accuracy"], one["accuracy_stderr"]
        row = [name, str(one["num_prompts"]), str(one["samples_per_prompt"]), _shown(accuracy)]
        row += [_shown(one["pass_at"].get(str(k))) for k in ks]
        row += [_shown(one["majority"])] * has_majority
        rows.append([*row, str(one["num_errors"] or "")])
    if all(row[-1] == "" for row in rows[1:]):
        rows = [row[:-1] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join([first, *others]).rstrip()


def _shown(value: Any) -> str:
    """Formats an estimate, which is a pair or a JSON object; "-" if there is none."""
    pair = tuple(value.values()) if isinstance(value, Mapping) else value
    return "-" if pair is None or pair[0] is None else str(Estimate(*pair))


def evaluate(
    config: ModelSource,
    overrides: Overrides = None,
    world: World = None,
    checkpoint: CheckpointFolder = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSONL file to evaluate, in place of the run's own held-out prompts."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure accuracy on the evaluation prompts and eval.sets, and the loss on held-out rows with
    responses. Sampling is greedy unless eval.temperature (or rollout.temperature) is set.
    """
    refuse_other_job(world)
    given = overrides or []
    loaded, used = evaluated_config(config, given, checkpoint)
    if prompts is not None:
        loaded = loaded.with_eval_prompts((str(prompts),))
    loaded = with_commits(loaded)
    files = loaded.data.eval_prompts if prompts else None
    warning = None
    if used is None:
        warning = untrained_warning(loaded, config) or template_warning(loaded, config)
    if is_rank():
        if not is_launched():
            validate_evaluation(loaded, torchrun_world(world), files, used)
            if warning and os.environ["RANK"] == "0":
                typer.echo(warning, err=True)
        _evaluate_rank(loaded, used, files, as_json)
        return
    loaded, laid, world_size = laid_out(loaded, world)
    validate_evaluation(loaded, world_size, files, used)
    if warning:
        typer.echo(warning, err=True)
    arguments = ["eval", str(config), *given, *laid]
    arguments += ["--checkpoint", str(checkpoint)] if checkpoint else []
    arguments += ["--prompts", str(prompts)] if prompts else []
    arguments += ["--json"] if as_json else []
    raise typer.Exit(launch_without_run(arguments, world_size))


def _evaluate_rank(
    config: Config, checkpoint: Path | None, prompts: Sequence[str] | None, as_json: bool
) -> None:
    from hybridrl.loop.run import evaluate_rank

    with json_only(as_json) as emit:
        result = evaluate_rank(config, checkpoint, prompts)
        if os.environ["RANK"] == "0":
            emit(result)
    if os.environ["RANK"] == "0" and not as_json:
        typer.echo(evaluation_text(result))
