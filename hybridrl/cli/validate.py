"""What the parent checks before any rank starts: configuration, model with its weights, data, run
folder with its checkpoint. No torch.

Owns collecting every violation into one ConfigError. Reads files, writes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hybridrl.checkpoint.folders import (
    HF_FILES,
    find_checkpoint,
    newest_checkpoint,
    read_state,
)
from hybridrl.cli.launch import num_local_gpus
from hybridrl.config.identity import check_run_folder, run_folder
from hybridrl.config.rules import ONE_RANK_ENGINES, check, layer_rules, split_rules
from hybridrl.config.schema import Config, DataConfig, ModelConfig, SupervisedConfig
from hybridrl.config.source import check_tokenizer_files, read_model_config
from hybridrl.config.supervised import Feedback
from hybridrl.config.teacher import is_scored, read_teacher, teacher_model, teacher_rules
from hybridrl.data.chats import chat_column
from hybridrl.data.feedback import checked, label_columns, response_columns
from hybridrl.data.rows import read_rows, validate_file
from hybridrl.environments.table import check_environment
from hybridrl.errors import ConfigError, UserError
from hybridrl.models.directory import read_config
from hybridrl.models.family import resolve_family
from hybridrl.models.headers import HfHeaders
from hybridrl.models.weights import fused_layout, hf_shapes
from hybridrl.rewards.functions import NEEDS_ANSWER, check_rewards
from hybridrl.rollout.vllm_version import head_dim_rule, installed_version

PACKAGE_OF_ENGINE = {"sglang": "sglang"}


def model_violations(
    config: Config, world_size: int, has_teacher: bool = True
) -> tuple[dict[str, Any], list[UserError]]:
    """Judges the configuration with the model's config.json and its family, and the teacher's.

    Returns:
        The content of config.json (empty where it cannot be read) and everything that is wrong.
    """
    hf_config: dict[str, Any] = {}
    found: list[UserError] = []
    rollout = config.rollout
    if (config.model.path is None) != (config.model.init is None):
        try:
            hf_config = read_model_config(config.model)
            family = resolve_family(config.model.family, hf_config)
            shape = family.shape(hf_config)
            if rollout.engine not in ONE_RANK_ENGINES and not check(config, world_size, hf_config):
                fused_layout(family, shape, rollout.tp, 0)  # the rules know no vocabulary
        except UserError as error:
            found.append(error)
    taught = _teacher(config, hf_config) if has_teacher else ()
    return hf_config, [*check(config, world_size, hf_config), *taught, *found]


def validate_replay(config: Config, world_size: int) -> None:
    """Checks all that `train --replay` needs, which reads no rows and no teacher.

    Raises:
        ConfigError: with every violation.
    """
    _raise_all(_common(config, world_size, has_teacher=False))
    _check_run(config)


def validate_training(config: Config, world_size: int) -> None:
    """Checks all that `train` needs.

    Raises:
        ConfigError: with every violation.
    """
    found = _common(config, world_size)
    data, answer, algorithm = config.data, _answer_column(config), config.algorithm
    if data.prompts is None:
        found.append(_no_file("data.prompts", "train"))
    elif isinstance(algorithm, SupervisedConfig):
        found += _responses(data, data.prompts, algorithm.feedback)
    else:
        found += _files(data, data.prompts, answer)
    for name, term in config.terms().items():
        paths = term.data.prompts
        if paths is None:
            found.append(_no_file(f"mix.{name}.data.prompts", "train"))
        elif isinstance(term.algorithm, SupervisedConfig):
            found += _responses(term.data, paths, term.algorithm.feedback)
        else:
            found += _files(term.data, paths, [])
    if data.eval_prompts is not None:
        found += _files(data, data.eval_prompts, answer)
    _raise_all(found)
    _check_run(config)


def validate_evaluation(
    config: Config, world_size: int, prompts: Sequence[str] | None, checkpoint: Path | None
) -> None:
    """Checks all that `eval` needs.

    Args:
        config: of the run.
        world_size: number of ranks.
        prompts: files in place of `data.eval_prompts`.
        checkpoint: folder in place of the run's newest.

    Raises:
        UserError: a ConfigError with every violation, or what is wrong with the checkpoint.
    """
    if prompts:
        data = config.data.model_copy(update={"eval_prompts": tuple(prompts)})
        config = config.model_copy(update={"data": data})
    found = _common(config, world_size, has_teacher=False)
    held_out = config.data.prompts if config.data.eval_share else None
    files = config.data.eval_prompts or held_out
    if not files:
        found.append(_no_file("data.eval_prompts", "eval"))
    else:
        found += _files(config.data, files, _answer_column(config))
    _raise_all(found)
    if checkpoint is not None:
        read_state(find_checkpoint(checkpoint))
    else:
        _check_run(config)


def validate_conversion(
    source: Path, target: Path, to: Literal["hf", "megatron"], tp: int, pp: int
) -> None:
    """Checks all that `convert` needs; arguments as on its command line.

    Raises:
        UserError: naming the folder, file or tensor that is wrong.
    """
    if not source.is_dir():
        found = "a file" if source.exists() else "no such folder"
        raise UserError(
            str(source), found, "an HF directory, a checkpoint or a run folder", "Check SRC."
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            str(target), "something is there already", "a new or empty folder", "Change DST."
        )
    if to == "hf":
        checkpoint = find_checkpoint(source)
        read_state(checkpoint)
        hf_config = read_config(checkpoint / HF_FILES)
    else:
        hf_config = read_config(source)
        check_weights(source, None, hf_config)
    _raise_all([*split_rules("--tp", tp, hf_config), *layer_rules("--pp", pp, hf_config)])


def check_weights(directory: Path, family_key: str | None, hf_config: dict[str, Any]) -> None:
    """Reads the headers of a directory's weights.

    Raises:
        UserError: naming the first file or tensor that is missing, damaged or not this model's.
    """
    family = resolve_family(family_key, hf_config)
    HfHeaders(directory).check(hf_shapes(family, family.shape(hf_config)))


def _common(config: Config, world_size: int, has_teacher: bool = True) -> list[UserError]:
    """Returns what is wrong with the parts of a configuration that every run has."""
    hf_config, found = model_violations(config, world_size, has_teacher)
    for model in (config.model, teacher_model(config) if has_teacher else None):
        if found or model is None or model.path is None:
            continue
        directory = Path(model.path).expanduser()
        if directory.is_dir():
            try:
                check_weights(directory, model.family, read_model_config(model))
            except UserError as error:
                found.append(error)
    return [*found, *_tokenizer(config.model), *_engine(config, hf_config), *_own_code(config)]


def _teacher(config: Config, policy: dict[str, Any]) -> Iterator[UserError]:
    """Judges the teacher by its config.json and its family."""
    found = list(teacher_rules(config, policy))
    yield from found
    try:
        if not found and (hf_config := read_teacher(config)) is not None:
            resolve_family(None, hf_config).shape(hf_config)
    except UserError as error:
        yield error


def _check_run(config: Config) -> None:
    """Refuses a run folder of another identity, or whose newest checkpoint is damaged."""
    check_run_folder(config)
    newest = newest_checkpoint(run_folder(config) / "checkpoints")
    if newest is not None:
        read_state(newest)


def _raise_all(found: list[UserError]) -> None:
    if found:
        raise ConfigError(found)


def _no_file(key: str, command: str) -> UserError:
    return UserError(
        key, "nothing", f"a JSONL file or other source, for {command}", f"Set {key} to a file."
    )


def _answer_column(config: Config) -> list[str]:
    scorers = config.reward.scorers().values() if is_scored(config) else ()
    is_needed = any(scorer.function in NEEDS_ANSWER for scorer in scorers)
    return [config.data.answer_key] if is_needed else []


def _files(
    data: DataConfig, paths: Sequence[str], other: Sequence[str], responses: Sequence[str] = ()
) -> Iterator[UserError]:
    for path in paths:
        try:
            validate_file(path, [data.prompt_key, *responses], other, chat_column(data))
        except UserError as error:
            yield error


def _responses(
    data: DataConfig, paths: Sequence[str], feedback: Feedback | None
) -> Iterator[UserError]:
    responses = response_columns(data, feedback)
    text, other = [data.prompt_key, *responses], label_columns(data, feedback)
    files = list(_files(data, paths, other, responses))
    yield from files
    if not files and feedback is not None:
        try:
            for _ in checked(read_rows(paths, text, other, chat_column(data)), data, feedback):
                pass
        except UserError as error:
            yield error


def _tokenizer(model: ModelConfig) -> Iterator[UserError]:
    try:
        check_tokenizer_files(model)
    except UserError as error:
        yield error


def _engine(config: Config, hf_config: dict[str, Any]) -> Iterator[UserError]:
    engine = config.rollout.engine
    if engine == "vllm":
        yield from _vllm(config.model, hf_config)
        return
    if find_spec(f"hybridrl.rollout.{engine}") is None:
        yield UserError("rollout.engine", engine, "hf", "This version has no adapter for it yet.")
    elif engine in PACKAGE_OF_ENGINE and find_spec(PACKAGE_OF_ENGINE[engine]) is None:
        package = PACKAGE_OF_ENGINE[engine]
        yield UserError(
            "rollout.engine", engine, "an installed engine", f"Run: pip install {package}"
        )


def _vllm(model: ModelConfig, hf_config: dict[str, Any]) -> Iterator[UserError]:
    is_cpu = num_local_gpus() == 0
    try:
        installed_version(is_cpu)
        shape = resolve_family(model.family, hf_config).shape(hf_config)
    except UserError as error:
        if hf_config:  # otherwise config.json could not be read, which is said already
            yield error
        return
    yield from head_dim_rule(shape.head_dim, is_cpu)


def _own_code(config: Config) -> Iterator[UserError]:
    """Looks for the user's own functions; an algorithm is not imported, for it imports torch."""
    yield from check_rewards(config.reward)
    yield from check_environment(config.environment)
    terms = {f"mix.{name}.algorithm": term.algorithm for name, term in config.terms().items()}
    for key, algorithm in {"algorithm": config.algorithm, **terms}.items():
        module, colon, _ = algorithm.name.partition(":")
        if colon and not _is_importable(module):
            allowed = "package.module:Class that can be imported"
            yield UserError(f"{key}.name", algorithm.name, allowed, f"No {module!r} here.")


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
