"""Checks the configuration, model, weights, data and run folder before any rank starts. No torch.
Collects all violations into one ConfigError. Writes only a record of data files that passed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from hybridrl.agents.check import check_agent, check_package
from hybridrl.agents.template_check import no_template
from hybridrl.checkpoint.folders import (
    EXPORTS,
    HF_FILES,
    HF_FORMAT,
    PEFT_FORMAT,
    Checkpoint,
    FileFormat,
    SavedState,
    check_family,
    newest_checkpoint,
    open_checkpoint,
)
from hybridrl.checkpoint.run_lock import check_free
from hybridrl.config.generation import declared_end_tokens, on_policy_rules, with_generation_config
from hybridrl.config.identity import check_run_folder, run_folder
from hybridrl.config.placement import Machines, PlacementConfig, asks_for, named_roles
from hybridrl.config.roles import reward_models
from hybridrl.config.rules import check, layer_rules, split_rules, without_training
from hybridrl.config.rules_placement import placed
from hybridrl.config.schema import Config, ModelConfig
from hybridrl.config.source import read_model_config, tokenizer_directory
from hybridrl.config.starter import has_template
from hybridrl.config.teacher import read_teacher, teacher_model, teacher_rules
from hybridrl.config.tokenizer import check_tokenizer_contents, check_tokenizer_files
from hybridrl.data.images import usable_rule
from hybridrl.environments.table import check_environment
from hybridrl.errors import MISSING, ConfigError, UserError
from hybridrl.loop.row_checks import RowChecks, errors_of, set_errors
from hybridrl.loop.versions import megatron_fault
from hybridrl.models.adapters.base_reference import base_directory
from hybridrl.models.families.by_length import at_length
from hybridrl.models.family import read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.headers import HfHeaders
from hybridrl.models.vision.shape import VisionShape
from hybridrl.models.weights import Head, fused_layout, hf_shapes
from hybridrl.parallel.descriptors import shortage
from hybridrl.parallel.host_gpus import local_gpu_names, num_local_gpus
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rewards.functions import check_rewards
from hybridrl.rollout.model_rules import (
    cpu_rules,
    policy_rules,
)
from hybridrl.rollout.registry import ENGINES, engine_package


def model_violations(
    config: Config,
    world_size: int,
    has_teacher: bool = True,
    default_dtype: str = "bfloat16",
    machines: Machines | None = None,
) -> tuple[dict[str, Any], list[UserError]]:
    """Checks the configuration against the models' config.json files and families. Returns the
    content of config.json ({} if it is unusable), and all violations.

    Args:
        has_teacher: Whether to check the teacher, if there is one; only training uses a teacher.
        default_dtype: Dtype of model.dtype=auto; bfloat16 on GPUs.
        machines: GPUs and nodes on which the ranks run; None if unknown.
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
                # No configuration rule checks the vocabulary size.
                fused_layout(family, shape, rollout.tp, 0, rollout.ep)
            found += policy_rules(config, family, shape, content)
            if shape.vision is not None:
                found += _images(config, shape.vision)
        except UserError as error:
            found.append(error)
    taught = [*on_policy_rules(config), *_teacher(config, hf_config)] if has_teacher else []
    rules = check(config, world_size, hf_config, default_dtype, machines=machines)
    return hf_config, [*rules, *taught, *found]


def validate_replay(config: Config, world_size: int) -> None:
    """Raises ConfigError unless `train --replay` can run, without data rows or a teacher."""
    _raise_all(_common(config, world_size, has_teacher=False))
    _check_run(config)


def validate_training(
    config: Config,
    world_size: int,
    resume: Literal["newest", "previous"] = "newest",
    slots: Sequence[int] = (),
) -> None:
    """Checks everything that `train` needs. Raises ConfigError with every violation. `slots` are
    the numbers of ranks on several hosts; if empty, `local_machines` determines them.
    """
    found = _common(config, world_size, slots=slots)
    data, rows = config.data, RowChecks.of(config)
    if data.prompts is None:
        found.append(_no_file("data.prompts", "train"))
    else:
        found += rows.training(data, data.prompts, config.algorithm.needs)
    for name, term in config.terms().items():
        paths = term.data.prompts
        if paths is None:
            found.append(_no_file(f"mix.{name}.data.prompts", "train"))
        else:
            of_term = RowChecks(reads_images=rows.reads_images)
            found += of_term.training(term.data, paths, term.algorithm.needs)
    if data.validation is not None:
        found += rows.training(data, data.validation, config.algorithm.needs)
    if data.eval_prompts is not None:
        found += rows.prompts(data, data.eval_prompts)
    _raise_all([*found, *set_errors(config), *_trackers(config)])
    check_free(run_folder(config))
    _check_run(config, reads_newest=resume == "newest")
    if config.checkpoint.export_hf:
        check_exports(run_folder(config))


def check_exports(folder: Path) -> None:
    """Raises UserError if exports could not be written, or would replace another run's exports."""
    exports, remedy = folder / EXPORTS, "Move it away, or choose another run.name."
    if os.path.lexists(exports) and not exports.is_dir():
        raise UserError(str(exports), "a file", "a folder, or no such path", remedy)
    has_checkpoint = newest_checkpoint(folder / "checkpoints") is not None
    if not has_checkpoint and exports.is_dir() and any(exports.iterdir()):
        allowed = "no exports in a run without checkpoints, because they would be replaced"
        raise UserError(str(exports), "a folder that is not empty", allowed, remedy)


def validate_evaluation(
    config: Config, world_size: int, prompts: Sequence[str] | None, checkpoint: Path | None
) -> None:
    """Checks everything that `eval` needs. `prompts` replaces `data.eval_prompts`; `checkpoint`
    replaces the run's newest checkpoint. Raises ConfigError with every violation, or the first
    error in the checkpoint.
    """
    if prompts:
        config = config.with_eval_prompts(prompts)
    found = without_training(_common(config, world_size, has_teacher=False))
    data, needs, rows = config.data, config.algorithm.needs, RowChecks.of(config)
    if data.eval_prompts:
        found += rows.prompts(data, data.eval_prompts)
    if data.validation:
        found += rows.training(data, data.validation, needs)
    if data.eval_share and data.prompts:
        found += rows.training(data, data.prompts, needs)
    elif not (data.eval_prompts or data.validation or config.eval.sets):
        key = "data.eval_prompts, data.validation or eval.sets"
        found.append(_no_file(key, "eval", "Give a file with --prompts FILE, or set one of them."))
    _raise_all([*found, *set_errors(config)])
    if checkpoint is not None:
        check_run_folder(config, trains=False)
        open_checkpoint(checkpoint)
        _check_tokenizer_contents(config.model)
    else:
        _check_run(config, trains=False)


def validate_serving(config: Config, world_size: int, checkpoint: Path | None) -> None:
    """Checks everything that `serve` needs, as `validate_evaluation` does."""
    found = without_training(_common(config, world_size, has_teacher=False))
    is_checked = config.agent.is_on  # the package is checked with the other rules
    _raise_all(found if is_checked else [*check_package(), *found])
    if checkpoint is None:
        _check_run(config, trains=False)
        return
    check_run_folder(config, trains=False)
    open_checkpoint(checkpoint)
    _check_tokenizer_contents(config.model)


def validate_conversion(
    source: Path,
    target: Path,
    to: FileFormat,
    tp: int,
    pp: int,
    family: str | None = None,
    base: Path | None = None,
) -> None:
    """Checks what `convert` needs. Raises UserError that names the faulty folder or tensor."""
    if not os.path.isdir(source):
        found = "a file" if os.path.exists(source) else "no such folder"
        raise UserError(
            str(source), found, "an HF directory, a checkpoint or a run folder", "Change SRC."
        )
    if os.path.exists(target) and (not target.is_dir() or any(target.iterdir())):
        raise UserError(
            str(target), "an existing file or folder", "a new or empty folder", "Change DST."
        )
    if to == "megatron":
        if base is not None:
            raise _no_base(base, "--to megatron")
        hf_config = read_config(source, family)
        check_weights(source, family, hf_config)
    else:
        checkpoint, state = open_checkpoint(source)
        check_family(state.family, family, checkpoint.folder)
        hf_config = read_config(checkpoint.folder / HF_FILES)
        read_model(state.family, hf_config)
        check_adapter_conversion(checkpoint, state, to, base)
    _raise_all([*split_rules("--tp", tp, hf_config), *layer_rules("--pp", pp, hf_config)])


def check_adapter_conversion(
    checkpoint: Checkpoint, state: SavedState, to: FileFormat, base: Path | None
) -> None:
    """Checks that a checkpoint with adapters, or with tensors that training did not load, converts.

    `base` replaces the path of the model from which training began. Raises UserError if the format
    cannot contain what was trained, or if that model is not found or differs.
    """
    folder, saved = checkpoint.folder, state.lora
    has_policy = any(name.startswith("policy/") for name in checkpoint.manifest.files)
    kept = state.passed_over if has_policy and to == HF_FORMAT else None
    if saved is None and kept is None and base is not None:
        raise _no_base(base, f"{folder}, which contains all weights")
    if to == PEFT_FORMAT:
        allowed = "a checkpoint of a run with LoRA adapters"
        if saved is None:
            raise UserError(str(folder), "no adapters", allowed, "Use --to hf.")
        parts = ", ".join(saved.full) if has_policy else "a value head"
        if parts:
            remedy = "Use --to hf, which writes all weights with the adapters merged into them."
            found = f"{parts}, trained in addition to the adapters"
            raise UserError(str(folder), found, "adapters alone, for --to peft", remedy)
        if base is not None:
            raise _no_base(base, "--to peft, which writes the adapters alone")
    elif saved is not None and saved.base.path is not None:
        base_directory(saved.base.reference, base)
    elif kept is not None:
        base_directory(kept.reference, base)
    elif base is not None:
        raise _no_base(base, f"{folder}, whose adapters were trained on initial weights")


def _no_base(base: Path, what: str) -> UserError:
    return UserError("--base", base, f"nothing with {what}", "Remove --base.")


def check_weights(
    directory: Path, family_key: str | None, hf_config: dict[str, Any], head: Head = "lm"
) -> None:
    """Raises UserError for the first weight file or tensor that is missing, damaged or unknown."""
    HfHeaders(directory).check(hf_shapes(*read_model(family_key, hf_config), head))


def _common(
    config: Config, world_size: int, has_teacher: bool = True, slots: Sequence[int] = ()
) -> list[UserError]:
    """Returns the violations in the parts of the configuration that all commands share."""
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
    found += errors_of(check_tokenizer_files, config.model)
    if (fault := megatron_fault()) is not None:
        found.append(fault)
    return [*found, *_engine(config, hf_config), *_own_code(config)]


def local_machines(
    section: PlacementConfig, world_size: int, slots: Sequence[int] = ()
) -> Machines | None:
    """Returns the GPUs and nodes of the ranks on this host, or of `slots` on several hosts. None if
    only the ranks can know the GPUs, because these are on other nodes or of different models, which
    CUDA numbers in an order of its choice. The ranks then check the placement.
    """
    if not named_roles(section):
        return Machines(world_size)
    each: int | None = world_size  # hybridrl's launcher starts all ranks on this host
    if slots:
        each = slots[0] if len(set(slots)) == 1 else None
    elif "RANK" in os.environ:
        local_size = os.environ.get("LOCAL_WORLD_SIZE")
        each = int(local_size) if local_size else None
    names = local_gpu_names() if each == world_size else None
    if names is not None and len(names) >= world_size:
        return Machines(world_size, each, names[:world_size])
    if asks_for(section, "gpu:") and num_local_gpus() > 0:
        return None
    return Machines(world_size, each)


def _descriptors(config: Config, machines: Machines) -> UserError | None:
    """Returns an error if the limit on open files is too low for the run's meshes, else None."""
    placement, misplaced = placed(config, machines)
    found = [] if misplaced else [placement.policy, *placement.named.values()]
    places = list(dict.fromkeys(found))
    layouts = [
        TrainLayout(len(place.ranks), place.tp, place.pp, place.cp, place.ep, etp=place.etp)
        for place in places
    ]
    return shortage(machines.num_ranks, layouts, is_cpu=num_local_gpus() == 0)


def _loaded_models(config: Config, has_teacher: bool) -> Iterator[tuple[ModelConfig, Head]]:
    yield config.model, "lm"
    teacher = teacher_model(config) if has_teacher else None
    if teacher is not None:
        yield teacher, "lm"
    for served in reward_models(config).values():
        yield served, "value"


def _teacher(config: Config, policy: dict[str, Any]) -> Iterator[UserError]:
    found = list(teacher_rules(config, policy))
    yield from found
    try:
        if not found and (hf_config := read_teacher(config)) is not None:
            read_model(None, hf_config)
            at_length(hf_config, config.longest_sequence())
    except UserError as error:  # add a prefix to the key, because the policy also has a config.json
        yield UserError(
            f"algorithm.teacher: {error.name}", error.value, error.allowed, error.remedy
        )


def _check_run(config: Config, reads_newest: bool = True, trains: bool = True) -> None:
    """Raises an error if the folder is another run's, or the checkpoint or tokenizer is damaged."""
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
    return UserError(key, MISSING, allowed, remedy or f"Set {key} to a file.")


def _trackers(config: Config) -> Iterator[UserError]:
    for package, name in (("wandb", config.log.wandb), ("mlflow", config.log.mlflow)):
        if name is not None and find_spec(package) is None:
            remedy = f"Run pip install {package}, or remove log.{package}."
            yield UserError(
                f"log.{package}", name, f"null, because {package} is not installed", remedy
            )


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
    if hf_config:  # if config.json is unusable, its errors are already reported
        family, shape = read_model(config.model.family, hf_config)
        name = config.rollout.engine
        if ENGINES[name].has_fused_parameters and not family.is_served_fused:
            yield UserError(
                "rollout.engine",
                name,
                f"hf with models of family {family.name}",
                f"{name} does not support this family. Set rollout.engine=hf.",
            )
        default = "float32" if is_cpu else "bfloat16"
        dtype = default if config.model.dtype == "auto" else config.model.dtype
        yield from package.model_rules(shape, dtype, is_cpu)
        yield from cpu_rules(config.rollout.quantization, config.rollout.kv_cache_dtype, is_cpu)


def _images(config: Config, vision: VisionShape) -> Iterator[UserError]:
    folder = tokenizer_directory(config.model)
    if not folder.is_dir():  # reported when the tokenizer is loaded
        return
    try:
        usable_rule(vision, folder, config.data.max_image_pixels)
    except UserError as error:
        yield error
    if config.agent.is_on and not has_template(str(folder)):
        yield no_template(config.model.tokenizer or config.model.path or str(config.model.init))


def _own_code(config: Config) -> Iterator[UserError]:
    """Checks the user's code. An algorithm is not imported, because that would import torch."""
    yield from check_rewards(config.reward)
    yield from check_environment(config.environment)
    yield from check_agent(config.agent)
    terms = {f"mix.{name}.algorithm": term.algorithm for name, term in config.terms().items()}
    for key, algorithm in {"algorithm": config.algorithm, **terms}.items():
        module, colon, _ = algorithm.name.partition(":")
        if colon and not _is_importable(module):
            allowed = "package.module:Class that can be imported"
            remedy = f"Check the name: there is no module {module!r}."
            yield UserError(f"{key}.name", algorithm.name, allowed, remedy)


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False
