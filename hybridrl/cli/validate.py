"""What the parent checks before any rank starts: configuration, model, data, run folder. No torch.

Owns collecting every violation into one ConfigError. Reads files, writes none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hybridrl.config.identity import check_run_folder
from hybridrl.config.rules import check
from hybridrl.config.schema import Config, ModelConfig, SftConfig
from hybridrl.config.source import read_model_config
from hybridrl.data.rows import validate_file
from hybridrl.errors import ConfigError, ModelError, UserError
from hybridrl.models.family import resolve_family
from hybridrl.rewards.functions import find_reward

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
PACKAGE_OF_ENGINE = {"vllm": "vllm", "sglang": "sglang"}


def model_violations(config: Config, world_size: int) -> tuple[dict[str, Any], list[UserError]]:
    """Judges the configuration with the model's config.json and its family.

    Returns:
        The content of config.json (empty where it cannot be read) and everything that is wrong.
    """
    hf_config: dict[str, Any] = {}
    found: list[UserError] = []
    if (config.model.path is None) != (config.model.init is None):
        try:
            hf_config = read_model_config(config.model)
            resolve_family(config.model.family, hf_config).shape(hf_config)
        except UserError as error:
            found.append(error)
    return hf_config, [*check(config, world_size, hf_config), *found]


def validate_training(config: Config, world_size: int) -> None:
    """Checks all that `train` needs.

    Raises:
        ConfigError: with every violation.
    """
    _, found = model_violations(config, world_size)
    found += [*_tokenizer(config.model), *_engine(config), *_own_code(config)]
    is_supervised = isinstance(config.algorithm, SftConfig)
    data, answer = config.data, _answer_column(config)
    if data.prompts is None:
        found.append(_no_file("data.prompts", "train"))
    elif is_supervised:
        found += _files(data.prompts, [data.prompt_key, data.response_key])
    else:
        found += _files(data.prompts, [data.prompt_key], answer)
    if data.eval_prompts is not None:
        found += _files(data.eval_prompts, [data.prompt_key], answer)
    _raise_all(found)
    check_run_folder(config)


def validate_evaluation(config: Config, world_size: int, prompts: Sequence[str] | None) -> None:
    """Checks all that `eval` needs; `prompts` replaces `data.eval_prompts`.

    Raises:
        ConfigError: with every violation.
    """
    _, found = model_violations(config, world_size)
    found += [*_tokenizer(config.model), *_engine(config), *_own_code(config)]
    files = prompts or config.data.eval_prompts
    if not files:
        found.append(_no_file("data.eval_prompts", "eval"))
    else:
        found += _files(files, [config.data.prompt_key], _answer_column(config))
    _raise_all(found)


def _raise_all(found: list[UserError]) -> None:
    if found:
        raise ConfigError(found)


def _no_file(key: str, command: str) -> UserError:
    return UserError(key, "nothing", f"a JSONL file, for {command}", f"Set {key} to a file.")


def _answer_column(config: Config) -> list[str]:
    return [config.data.answer_key] if config.reward.function == "exact_match" else []


def _files(
    paths: Sequence[str], text: Sequence[str], other: Sequence[str] = ()
) -> Iterator[UserError]:
    for path in paths:
        try:
            validate_file(path, text, other)
        except UserError as error:
            yield error


def _tokenizer(model: ModelConfig) -> Iterator[UserError]:
    place = Path(model.tokenizer or model.path or model.init or "").expanduser()
    if place.is_file() and model.tokenizer is None:
        place = place.parent
    if place.is_dir() and not any((place / name).is_file() for name in TOKENIZER_FILES):
        yield ModelError(
            "model.tokenizer",
            str(place),
            f"a directory with one of {', '.join(TOKENIZER_FILES)}",
            "Set model.tokenizer to a directory that holds the tokenizer.",
        )


def _engine(config: Config) -> Iterator[UserError]:
    engine = config.rollout.engine
    if find_spec(f"hybridrl.rollout.{engine}") is None:
        yield UserError("rollout.engine", engine, "hf", "This version has no adapter for it yet.")
    elif engine in PACKAGE_OF_ENGINE and find_spec(PACKAGE_OF_ENGINE[engine]) is None:
        package = PACKAGE_OF_ENGINE[engine]
        yield UserError(
            "rollout.engine", engine, "an installed engine", f"Run: pip install {package}"
        )


def _own_code(config: Config) -> Iterator[UserError]:
    """Looks for the user's own functions; an algorithm is not imported, for it imports torch."""
    try:
        find_reward(config.reward)
    except UserError as error:
        yield error
    module, colon, _ = config.algorithm.name.partition(":")
    if colon and not _is_importable(module):
        allowed = "package.module:Class that can be imported"
        yield UserError("algorithm.name", config.algorithm.name, allowed, f"No {module!r} here.")


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
