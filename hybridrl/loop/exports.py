"""Exports trained models as HF or PEFT directories, as `hybridrl convert` does. Collective. Every
rank that can write to the folder writes some of the tensors.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hybridrl import __version__
from hybridrl.checkpoint.folders import EXPORTS, HF_FILES, PEFT_FORMAT
from hybridrl.config.files import read_json_object, replace_text
from hybridrl.config.generation import GENERATION_CONFIG
from hybridrl.config.identity import run_folder
from hybridrl.config.load import changed_yaml
from hybridrl.config.schema import Config
from hybridrl.config.starter import EXPORTED
from hybridrl.config.wrapped_models import has_images
from hybridrl.data.end_tokens import turn_end
from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.export import export_hf, gather_tensors
from hybridrl.metrics.estimates import Estimate
from hybridrl.metrics.values import STDERR, VALIDATION
from hybridrl.models.adapters.base_reference import base_directory
from hybridrl.models.adapters.lora import EXPERTS
from hybridrl.models.adapters.peft_files import write_peft
from hybridrl.models.adapters.rows import base_of, modules, only_adapters, without_expert_adapters
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.hf.config_keys import end_tokens_of
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.exported_config import exported_config
from hybridrl.models.hf.shards import KeptTensors
from hybridrl.models.weights import hf_shapes
from hybridrl.training.model import ParallelModel

# Families whose experts PEFT 0.21 does not stack, because it lacks a rule for their `model_type`.
UNSTACKED_BY_PEFT = ("qwen2_moe", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe")
_EXPORT = re.compile(r"(step_\d+)(?:_\w+)?")
_PARTIAL = ".*.partial"  # folders that a killed run left behind


def export_model(
    model: ParallelModel,
    directory: Path,
    side_files: Path | None,
    card: str | None = None,
    moved: Path | None = None,
) -> None:
    """Writes a model as an HF directory; collective.

    Args:
        side_files: Folder whose tokenizer and generation files are copied.
        card: Text for README.md.
        moved: New path of the HF directory `ModelSource.passed_over`, if it was moved.

    Raises:
        UserError: A rank cannot write, or tensors that training did not load are not found; raised
            on all ranks.
    """
    source, world = model.source, model.world
    shapes = hf_shapes(base_of(source.family), model.shape, model.head)
    kept = None
    if model.head == "lm" and source.passed_over is not None:
        with world.all_agree("finding the tensors that training passed over"):
            kept = KeptTensors(base_directory(source.passed_over, moved), shapes)
    with world.all_agree("writing the HF directory", is_unbounded=True):
        export_hf(
            directory,
            model.whole_weights(),
            shapes,
            source.dtype,
            exported_config(
                source.hf_config,
                model.head,
                side_files,
                model.score_token,
                is_wrapped=kept is not None and kept.is_wrapped,
            ),
            peers=world,
            side_files=side_files,
            card=card,
            kept=kept,
        )
    if model.head == "lm":
        with world.all_agree("naming the end tokens"):
            if world.rank == 0:
                declare_turn_end(directory)


def export_peft(
    model: ParallelModel, directory: Path, side_files: Path | None, card: str | None = None
) -> None:
    """Writes a model's LoRA adapters for PEFT. Nothing else may be trained (`peft_rule`).
    Collective. See `export_model` for the arguments. Raises UserError on all ranks if rank 0 cannot
    write.
    """
    source, world = model.source, model.world
    assert model.lora is not None and model.base is not None
    shapes = hf_shapes(only_adapters(source.family), source.shape)
    with world.all_agree("writing the PEFT directory", is_unbounded=True):
        whole = gather_tensors(model.adapters(), shapes, source.dtype, world)
        tensors = {name: tensor.cpu() for name, tensor in whole}
        if world.rank == 0:
            is_wrapped = has_images(model.source.hf_config)
            write_peft(directory, tensors, model.lora, model.base, side_files, card, is_wrapped)


def merging_note(model: ParallelModel) -> str | None:
    """Returns a sentence about what merging the adapters loses, if there are any. Collective."""
    lost = model.merging_loss()
    if lost is None:
        return None
    dtype = str(model.source.dtype).removeprefix("torch.")
    return f"rounding merged weights to {dtype} loses {100 * lost:.2g} % of the adapters' update"


def peft_notice(family: Family, shape: ModelShape) -> str | None:
    """Returns a sentence about adapters in a PEFT directory that PEFT does not load, if any.

    PEFT (0.21, with transformers 5) mistakes every target that has the name of an expert's
    projection for the stacked experts, so it creates no adapters on dense and shared layers with
    such names. With the families in `UNSTACKED_BY_PEFT`, it loads those adapters, but ignores the
    experts' adapters.
    """
    if family.name in UNSTACKED_BY_PEFT:
        if family.lora is None or EXPERTS not in family.lora.targets:
            return None
        return (
            f"PEFT 0.21 with transformers 5 loads no adapters on experts of {family.name} models, "
            "without a warning; hybridrl reads them. Convert with `--to hf` for other tools"
        )
    projections = [row for row in base_of(family).rows(shape) if row.num_experts]
    of_experts = {name.rpartition(".")[2] for row in projections for name in modules(row)}
    adapted = without_expert_adapters(family)
    rows = only_adapters(adapted).rows(shape) if adapted.lora is not None else ()
    layers = [part.split(".")[-3] for row in rows for part in row.parts]
    found = [name for name in dict.fromkeys(layers) if name in of_experts]
    if not found:
        return None
    return (
        f"PEFT 0.21 with transformers 5 ignores the adapters on {', '.join(found)} of dense and "
        "shared layers, because the experts' layers have the same names; hybridrl reads them"
    )


def declare_turn_end(directory: Path) -> None:
    """Adds the template's end-of-turn token to generation_config.json, for other engines."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception:  # no usable tokenizer files; the run's tokenizer may exist only in memory
        return
    end, file = turn_end(tokenizer), directory / GENERATION_CONFIG
    config = read_config(directory)
    # Transformers reads these values from config.json only if generation_config.json is missing.
    defaults: dict[str, Any] = {
        key: config[key] for key in ("bos_token_id", "pad_token_id") if key in config
    }
    content = read_json_object(file, ModelError) if file.is_file() else defaults
    named = end_tokens_of(content) or end_tokens_of(config)
    if end is not None and end not in named:
        content["eos_token_id"] = [*named, end]
        replace_text(file, json.dumps(content, indent=2) + "\n")


def export_with_tokenizer(
    model: ParallelModel,
    directory: Path,
    side_files: Path,
    tokenizer: PreTrainedTokenizerBase,
    card: str,
) -> None:
    """Writes an HF directory with the run's tokenizer, which may exist only in memory."""
    export_model(model, directory, side_files, card)
    with model.world.all_agree("writing the tokenizer"):
        has_tokenizer = any(directory.glob("tokenizer*"))
        if model.world.rank == 0 and not has_tokenizer and hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(str(directory))
            if model.head == "lm":
                declare_turn_end(directory)


class Exports:
    """Writes `exports/step_N` for the policy or reward model, `step_N_critic` for a critic."""

    def __init__(self, config: Config, notify: Callable[[str], None]) -> None:
        self._config, self._notify = config, notify
        self._root = run_folder(config) / EXPORTS

    def write(
        self,
        checkpoint: Path,
        models: Mapping[str, ParallelModel],
        evaluations: Mapping[str, Mapping[str, float]],
    ) -> None:
        """Exports a new checkpoint, if configured, and removes exports of removed ones."""
        if not self._config.checkpoint.export_hf:
            return
        is_peft = self._config.checkpoint.export_hf == PEFT_FORMAT
        for name, model in models.items():
            is_main = len(models) == 1 or name == "policy"
            folder = self._root / (checkpoint.name + ("" if is_main else f"_{name}"))
            card = model_card(self._config, model, checkpoint.name, evaluations, is_peft)
            with model.world.all_agree("preparing the export"):
                if model.world.rank == 0:
                    self._remove(folder, checkpoint.parent)
            if is_peft:
                export_peft(model, folder, checkpoint / HF_FILES, card)
            else:
                export_model(model, folder, checkpoint / HF_FILES, card)
            source = model.source
            lost = peft_notice(source.family, source.shape) if is_peft else merging_note(model)
            self._notify(f"exported {folder}" + (f"; {lost}" if lost else ""))

    def _remove(self, folder: Path, checkpoints: Path) -> None:
        """Deletes `folder` if it exists, and all exports whose checkpoints no longer exist."""
        shutil.rmtree(folder, ignore_errors=True)
        if not self._root.is_dir():
            return
        for partial in self._root.glob(_PARTIAL):
            shutil.rmtree(partial, ignore_errors=True)
        for path in self._root.iterdir():
            found = _EXPORT.fullmatch(path.name)
            if found is not None and not (checkpoints / found[1]).is_dir():
                shutil.rmtree(path, ignore_errors=True)


def export_command(config: Config) -> str | None:
    """Returns the command that exports a run's newest checkpoint; None if there is an export."""
    folder = run_folder(config)
    target = folder / EXPORTED
    if config.checkpoint.export_hf or target.exists():
        return None
    family = [] if config.model.family is None else ["--family", config.model.family]
    return shlex.join(["hybridrl", "convert", str(folder), str(target), "--to", "hf", *family])


def model_card(
    config: Config,
    model: ParallelModel,
    checkpoint: str,
    evaluations: Mapping[str, Mapping[str, float]],
    is_peft: bool = False,
) -> str:
    """Returns the README.md of an exported model or of its adapters, without secrets."""
    is_scorer = model.head == "value"
    front = {
        "library_name": "peft" if is_peft else "transformers",
        "pipeline_tag": "text-classification" if is_scorer else "text-generation",
        "tags": ["hybridrl", config.algorithm.name],
    }
    base = config.model.path
    # A local folder means nothing to readers of the card.
    if base is not None and not os.path.exists(os.path.expanduser(base)):
        front["base_model"] = base.split("@")[0]
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in front.items()), "---", ""]
    lines += [f"# {config.run.name}, {checkpoint.replace('_', ' ')}", ""]
    kind = "A reward model or critic (1 label)" if is_scorer else "A language model"
    kind = "LoRA adapters of a language model" if is_peft else kind
    made = f"trained by hybridrl {__version__} with `{config.algorithm.name}`"
    origin = "from initial weights" if base is None else f"from `{_shown(base)}`"
    lines += [f"{kind}, {made}, {origin}.", ""]
    # Leave evaluations out of the critic's card, because they describe the policy.
    if evaluations and (not is_scorer or config.algorithm.name == "reward_model"):
        lines += ["## Measured", "", *_table(evaluations), ""]
    lines += ["## Configuration", "", "All other knobs have their default values.", ""]
    lines += ["```yaml", changed_yaml(config).rstrip(), "```", ""]
    return "\n".join(lines)


def _shown(base: str) -> str:
    return os.path.basename(os.path.normpath(base)) if os.path.exists(base) else base


def _table(evaluations: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    steps = sorted(evaluations, key=int)
    first, last = evaluations[steps[0]], evaluations[steps[-1]]
    yield f"| | step {steps[0]} | step {steps[-1]} |"
    yield "| --- | --- | --- |"
    for name in (key for key in last if not key.endswith(STDERR)):
        cells = [_estimate(found, name) for found in (first, last)]
        yield f"| {name.replace(VALIDATION, 'held-out ')} | {' | '.join(cells)} |"


def _estimate(found: Mapping[str, float], name: str) -> str:
    return str(Estimate(found[name], found.get(name + STDERR))) if name in found else ""
