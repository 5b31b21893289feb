"""What the parent checks before any rank starts: configuration, model with its weights, data, run
folder with its checkpoint. No torch.

Owns collecting every violation into one ConfigError. Reads files, and writes none but the marks of
rows that were checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hybridrl.checkpoint.folders import (
    HF_FILES,
    HF_FORMAT,
    FileFormat,
    check_family,
    newest_checkpoint,
    open_checkpoint,
)
from hybridrl.checkpoint.run_lock import check_free
from hybridrl.config.generation import (
    declared_end_tokens,
    on_policy_rules,
    with_generation_config,
)
from hybridrl.config.identity import check_run_folder, run_folder
from hybridrl.config.needs import Feedback, Needs
from hybridrl.config.placement import Machines, PlacementConfig, asks_for, named_roles
from hybridrl.config.roles import reward_models, trains_policy
from hybridrl.config.rules import check, layer_rules, split_rules, without_training
from hybridrl.config.rules_placement import placed
from hybridrl.config.schema import Config, DataConfig, ModelConfig, RewardConfig
from hybridrl.config.source import read_model_config
from hybridrl.config.teacher import is_scored, read_teacher, teacher_model, teacher_rules
from hybridrl.config.tokenizer import check_tokenizer_contents, check_tokenizer_files
from hybridrl.data.evaluation_sets import set_rows
from hybridrl.data.feedback import checked, label_columns
from hybridrl.data.forms import Kind, formed_rows, kind_of, validate_file
from hybridrl.data.prompt_store import unless_checked
from hybridrl.data.rows import BadRows
from hybridrl.environments.table import check_environment
from hybridrl.errors import ConfigError, DataError, UserError
from hybridrl.models.families.by_length import at_length
from hybridrl.models.family import bias_rule, read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.headers import HfHeaders
from hybridrl.models.trainable import freeze_rules
from hybridrl.models.weights import Head, fused_layout, hf_shapes
from hybridrl.parallel.descriptors import shortage
from hybridrl.parallel.host_gpus import local_gpu_names, num_local_gpus
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rewards.functions import NEEDS_ANSWER, RowCheck, check_rewards
from hybridrl.rollout.registry import ENGINES, engine_package


def model_violations(
    config: Config,
    world_size: int,
    has_teacher: bool = True,
    default_dtype: str = "bfloat16",
    machines: Machines | None = None,
) -> tuple[dict[str, Any], list[UserError]]:
    """Judges the configuration with the model's config.json and its family, and the teacher's.

    Args:
        config: of the run.
        world_size: number of ranks.
        has_teacher: whether the run trains; then its teacher, if there is one, is read and judged.
        default_dtype: what model.dtype=auto stands for; a GPU's where that is not known.
        machines: under the ranks; None: they are not known.

    Returns:
        The content of config.json (empty where it cannot be used) and everything that is wrong.
    """
    hf_config: dict[str, Any] = {}
    found: list[UserError] = []
    try:
        config = with_generation_config(config)
    except UserError as error:
        found.append(error)
    rollout = config.rollout
    if (config.model.path is None) != (config.model.init is None):
        try:
            content = read_model_config(config.model)
            family, shape = read_model(config.model.family, content)
            at_length(content, config.longest_sequence())
            hf_config = content
            declared_end_tokens(config.model, content)
            if ENGINES[rollout.engine].has_fused_parameters and not check(
                config, world_size, hf_config, machines=machines
            ):
                # The rules know no vocabulary.
                fused_layout(family, shape, rollout.tp, 0, rollout.ep)
            found += bias_rule(config.train.moe.bias_update_rate, family, shape)
            head: Head = "lm" if trains_policy(config) else "value"
            found += freeze_rules(config.train.freeze, family, shape, head)
        except UserError as error:
            found.append(error)
    taught = [*on_policy_rules(config), *_teacher(config, hf_config)] if has_teacher else []
    rules = check(config, world_size, hf_config, default_dtype, machines=machines)
    return hf_config, [*rules, *taught, *found]


def validate_replay(config: Config, world_size: int) -> None:
    """Checks all that `train --replay` needs, which reads no rows and no teacher.

    Raises:
        ConfigError: with every violation.
    """
    _raise_all(_common(config, world_size, has_teacher=False))
    _check_run(config)


def validate_training(
    config: Config,
    world_size: int,
    resume: Literal["newest", "previous"] = "newest",
    slots: Sequence[int] = (),
) -> None:
    """Checks all that `train` needs.

    Args:
        config: of the run.
        world_size: number of ranks.
        resume: which checkpoint the run goes on from.
        slots: ranks of each host of several; none: as of `local_machines`.

    Raises:
        ConfigError: with every violation.
    """
    found = _common(config, world_size, slots=slots)
    data, scored = config.data, _scored(config)
    if data.prompts is None:
        found.append(_no_file("data.prompts", "train"))
    else:
        found += _rows(data, data.prompts, config.algorithm.needs, scored)
    for name, term in config.terms().items():
        paths = term.data.prompts
        if paths is None:
            found.append(_no_file(f"mix.{name}.data.prompts", "train"))
        else:
            found += _rows(term.data, paths, term.algorithm.needs, _Scored())
    if data.validation is not None:
        found += _rows(data, data.validation, config.algorithm.needs, scored)
    if data.eval_prompts is not None:
        found += _files(data, data.eval_prompts, scored)
    _raise_all([*found, *_sets(config), *_trackers(config)])
    check_free(run_folder(config))
    _check_run(config, reads_newest=resume == "newest")


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
    found = without_training(_common(config, world_size, has_teacher=False))
    data, needs, scored = config.data, config.algorithm.needs, _scored(config)
    if data.eval_prompts:
        found += _files(data, data.eval_prompts, scored)
    if data.validation:
        found += _rows(data, data.validation, needs, scored)
    if data.eval_share and data.prompts:
        found += _rows(data, data.prompts, needs, scored)
    elif not (data.eval_prompts or data.validation or config.eval.sets):
        key = "data.eval_prompts, data.validation or eval.sets"
        found.append(_no_file(key, "eval", "Give a file with --prompts FILE, or set one of them."))
    _raise_all([*found, *_sets(config)])
    if checkpoint is not None:
        check_run_folder(config, trains=False)
        open_checkpoint(checkpoint)
        _check_tokenizer_contents(config.model)
    else:
        _check_run(config, trains=False)


def validate_conversion(
    source: Path,
    target: Path,
    to: FileFormat,
    tp: int,
    pp: int,
    family: str | None = None,
) -> None:
    """Checks all that `convert` needs; arguments as on its command line.

    Raises:
        UserError: naming the folder, file or tensor that is wrong.
    """
    if not os.path.isdir(source):
        found = "a file" if os.path.exists(source) else "no such folder"
        raise UserError(
            str(source), found, "an HF directory, a checkpoint or a run folder", "Check SRC."
        )
    if os.path.exists(target) and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            str(target), "something is there already", "a new or empty folder", "Change DST."
        )
    if to == HF_FORMAT:
        checkpoint, state = open_checkpoint(source)
        check_family(state.family, family, checkpoint.folder)
        hf_config = read_config(checkpoint.folder / HF_FILES)
        read_model(state.family, hf_config)
    else:
        hf_config = read_config(source)
        check_weights(source, family, hf_config)
    _raise_all([*split_rules("--tp", tp, hf_config), *layer_rules("--pp", pp, hf_config)])


def check_weights(
    directory: Path, family_key: str | None, hf_config: dict[str, Any], head: Head = "lm"
) -> None:
    """Reads the headers of a directory's weights.

    Raises:
        UserError: naming the first file or tensor that is missing, damaged or not this model's.
    """
    HfHeaders(directory).check(hf_shapes(*read_model(family_key, hf_config), head))


def _common(
    config: Config, world_size: int, has_teacher: bool = True, slots: Sequence[int] = ()
) -> list[UserError]:
    """Returns what is wrong with the parts of a configuration that every run has."""
    machines = local_machines(config.placement, world_size, slots)
    hf_config, found = model_violations(config, world_size, has_teacher, machines=machines)
    if not found and (lacking := _descriptors(config, machines or Machines(world_size))):
        found.append(lacking)
    for model, head in _loaded_models(config, has_teacher):
        if found or model.path is None:
            continue
        directory = Path(os.path.expanduser(model.path))
        if os.path.isdir(directory):
            try:
                content = read_model_config(model)
                check_weights(directory, model.family, content, head)
                at_length(content, config.longest_sequence())
            except UserError as error:
                found.append(error)
    return [*found, *_tokenizer(config.model), *_engine(config, hf_config), *_own_code(config)]


def local_machines(
    section: PlacementConfig, world_size: int, slots: Sequence[int] = ()
) -> Machines | None:
    """Returns what is under the ranks that this host starts, or of which this process is one; or
    under those of several hosts, by the ranks of each (`slots`).

    None where a placement asks for what only the ranks know when they have met: the GPUs of other
    nodes, or which of unlike GPUs here CUDA counts first. They judge it then.
    """
    if not named_roles(section):
        return Machines(world_size)
    each: int | None = world_size  # our own launcher starts all ranks here
    if slots:
        each = slots[0] if len(set(slots)) == 1 else None
    elif "RANK" in os.environ:
        told = os.environ.get("LOCAL_WORLD_SIZE")
        each = int(told) if told else None
    names = local_gpu_names() if each == world_size else None
    if names is not None and len(names) >= world_size:
        return Machines(world_size, each, names[:world_size])
    if asks_for(section, "gpu:") and num_local_gpus() > 0:
        return None
    return Machines(world_size, each)


def _descriptors(config: Config, machines: Machines) -> UserError | None:
    """Judges how many files a process may open here, for layouts that fit the ranks: those of all
    places where models lie, as Mesh counts them.
    """
    placement, misplaced = placed(config, machines)
    found = [] if misplaced else [placement.policy, *placement.named.values()]
    places = list(dict.fromkeys(found))
    layouts = [
        TrainLayout(len(place.ranks), place.tp, place.pp, place.cp, place.ep, etp=place.etp)
        for place in places
    ]
    return shortage(machines.num_ranks, layouts, is_cpu=num_local_gpus() == 0)


def _loaded_models(config: Config, has_teacher: bool) -> Iterator[tuple[ModelConfig, Head]]:
    """Yields every model whose weights a run loads, with its head."""
    yield config.model, "lm"
    teacher = teacher_model(config) if has_teacher else None
    if teacher is not None:
        yield teacher, "lm"
    for served in reward_models(config).values():
        yield served, "value"


def _teacher(config: Config, policy: dict[str, Any]) -> Iterator[UserError]:
    """Judges the teacher by its config.json and its family."""
    found = list(teacher_rules(config, policy))
    yield from found
    try:
        if not found and (hf_config := read_teacher(config)) is not None:
            read_model(None, hf_config)
            at_length(hf_config, config.longest_sequence())
    except UserError as error:  # the policy has a config.json too
        yield UserError(
            f"algorithm.teacher: {error.name}", error.value, error.allowed, error.remedy
        )


def _check_run(config: Config, reads_newest: bool = True, trains: bool = True) -> None:
    """Refuses a run folder of another identity, or whose newest checkpoint is damaged, and damaged
    tokenizer files, which take longest to read.
    """
    check_run_folder(config, trains)
    newest = newest_checkpoint(run_folder(config) / "checkpoints")
    if newest is not None and reads_newest:
        open_checkpoint(newest)
    _check_tokenizer_contents(config.model)


def _check_tokenizer_contents(model: ModelConfig) -> None:
    _, shape = read_model(model.family, read_model_config(model))
    check_tokenizer_contents(model, shape.vocab_size)


def _raise_all(found: list[UserError]) -> None:
    if found:
        raise ConfigError(found)


def _no_file(key: str, command: str, remedy: str | None = None) -> UserError:
    allowed = f"a JSONL file or other source, for {command}"
    return UserError(key, "nothing", allowed, remedy or f"Set {key} to a file.")


def _trackers(config: Config) -> Iterator[UserError]:
    for package, name in (("wandb", config.log.wandb), ("mlflow", config.log.mlflow)):
        if name is not None and find_spec(package) is None:
            remedy = f"pip install {package}, or leave log.{package} out."
            yield UserError(f"log.{package}", name, f"null without the package {package}", remedy)


@dataclass(frozen=True)
class _Scored:
    """What rows need so that responses to them can be scored.

    Args:
        columns: that each row must have.
        check: is asked about each row. None: there is no reward that looks at rows, or
            `reward.on_error` says what responses to a wrong one are worth.
    """

    columns: Sequence[str] = ()
    check: RowCheck | None = None

    @staticmethod
    def by(reward: RewardConfig, data: DataConfig) -> _Scored:
        """Returns what these rewards need."""
        has_answers = any(one.function in NEEDS_ANSWER for one in reward.scorers().values())
        is_checked = reward.on_error == "stop" and not check_rewards(reward)
        columns = [data.answer_key] if has_answers else []
        return _Scored(columns, RowCheck(reward) if is_checked else None)

    def looked_for(self) -> list[object]:
        """Returns, for JSON, what decides which rows are right."""
        return [list(self.columns), [] if self.check is None else self.check.identity()]


def _scored(config: Config) -> _Scored:
    return _Scored.by(config.reward, config.data) if is_scored(config) else _Scored()


def _rows(
    data: DataConfig, paths: Sequence[str], needs: Needs | None, scored: _Scored
) -> list[UserError]:
    """Checks what an algorithm trains on; of one of the user's own only prompts are looked for."""
    if needs is None or needs.rollouts:
        return _files(data, paths, scored)
    feedback = needs.feedback
    kind, columns = kind_of(feedback, has_responses=True), label_columns(data, feedback)
    return unless_checked(
        data, paths, [kind, columns], lambda: [*_responses(data, paths, kind, columns, feedback)]
    )


def _files(data: DataConfig, paths: Sequence[str], scored: _Scored) -> list[UserError]:
    """Checks what is evaluated, or given responses."""
    return unless_checked(
        data,
        paths,
        ["prompts", *scored.looked_for()],
        lambda: [*_each_file(data, paths, "prompts", scored.columns, scored.check)],
    )


def _sets(config: Config) -> Iterator[UserError]:
    """Checks the rows and the scorers of `eval.sets`."""
    for name, section in config.eval.sets.items():
        for error in check_rewards(section.scored_by):
            key = error.name.replace("reward", f"eval.sets.{name}.scorer", 1)
            yield UserError(key, error.value, error.allowed, error.remedy)
        function = section.scored_by.function
        try:
            for number, row in enumerate(set_rows(section, config.data), 1):
                if function in NEEDS_ANSWER and "answer" not in row:
                    yield DataError(
                        f"eval.sets.{name}.path",
                        f"no answer in row {number}",
                        f"an answer in every row, for {function}",
                        "Set data.answer_key to its column, or another scorer.",
                    )
                    break
        except UserError as error:
            yield error


def _each_file(
    data: DataConfig,
    paths: Sequence[str],
    kind: Kind,
    required: Sequence[str],
    check: RowCheck | None = None,
) -> Iterator[UserError]:
    for path in paths:
        try:
            validate_file(path, data, kind, required, check)
        except UserError as error:
            yield error


def _responses(
    data: DataConfig,
    paths: Sequence[str],
    kind: Kind,
    required: Sequence[str],
    feedback: Feedback | None,
) -> Iterator[UserError]:
    files = list(_each_file(data, paths, kind, required))
    yield from files
    if not files and feedback is not None:
        bad, good = BadRows(data.on_bad_row), set[int]()
        try:
            rows = formed_rows(paths, data, kind, required, bad)
            for row in checked(rows, data, feedback, bad):
                good.add(row.source)
            bad.check(good)
        except UserError as error:
            yield error


def _tokenizer(model: ModelConfig) -> Iterator[UserError]:
    try:
        check_tokenizer_files(model)
    except UserError as error:
        yield error


def _engine(config: Config, hf_config: dict[str, Any]) -> Iterator[UserError]:
    package = engine_package(config.rollout.engine)
    if package is None:
        return
    is_cpu = num_local_gpus() == 0
    try:
        package.installed_version(is_cpu)
    except UserError as error:
        yield error
        return
    if hf_config:  # else what is wrong with it is said already
        family, shape = read_model(config.model.family, hf_config)
        name = config.rollout.engine
        if ENGINES[name].has_fused_parameters and not family.is_served_fused:
            yield UserError(
                "rollout.engine",
                name,
                f"hf with models of family {family.name}",
                f"{name} has no code of its own for the family. Set rollout.engine=hf.",
            )
        yield from package.model_rules(shape, is_cpu)


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
