"""Converts HF directories to Megatron checkpoints and back, and adapters to PEFT directories."""

from __future__ import annotations

import sys
from math import gcd
from pathlib import Path

import torch

from hybridrl.checkpoint.folders import HF_FILES, PEFT_FORMAT, FileFormat, check_family
from hybridrl.checkpoint.model_state import load_model
from hybridrl.checkpoint.opening import open_on_all_ranks
from hybridrl.checkpoint.writing import write_checkpoint
from hybridrl.config.schema import ModelConfig, TrainConfig
from hybridrl.console import say
from hybridrl.loop.checkpoints import OLD_SCORES
from hybridrl.loop.exports import export_model, export_peft, merging_note, peft_notice
from hybridrl.loop.preflight import check_adapter_conversion
from hybridrl.models.adapters.base_reference import (
    BaseReference,
    base_directory,
    init_digest,
    other_base,
    weights_digest,
)
from hybridrl.models.adapters.rows import adapted
from hybridrl.models.family import ModelShape, is_kept_in_fp32, read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.passed_over import passed_over
from hybridrl.models.hf.shards import HfCheckpoint, load_hf
from hybridrl.models.score_token import BEFORE_LAST
from hybridrl.models.weights import VALUE_HEAD, Head, hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh, layout_name
from hybridrl.platform import Platform
from hybridrl.training.from_config import load_weights, start_weights
from hybridrl.training.model import ModelSource, ParallelModel

TIMEOUT_S = 1800.0


def convert_rank(
    source: Path,
    target: Path,
    to: FileFormat,
    tp: int,
    pp: int,
    family: str | None = None,
    base: Path | None = None,
) -> None:
    """Runs one rank of `hybridrl convert`.

    Args:
        source: An HF directory if `to` is 'megatron', otherwise a checkpoint or run folder.
        target: New or empty folder.
        tp, pp: Parallel sizes during the conversion. Runs with any layout can load the result.
        family: Model family, by default that of config.json or of the checkpoint.
        base: HF directory of the model from which training began, if it was moved.
    """
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, TIMEOUT_S)
    world = World(platform, TIMEOUT_S)
    if to == "megatron":
        _to_megatron(world, (tp, pp), source, target, family)
    else:
        _from_checkpoint(world, (tp, pp), source, target, to, family, base)
    stop_process_group()


def _mesh(world: World, tp: int, pp: int, shape: ModelShape) -> Mesh:
    """Returns the mesh; ep is the greatest common divisor of `tp` and the number of experts."""
    ep = 1 if shape.moe is None else gcd(tp, shape.moe.num_experts)
    mesh = Mesh(world, TrainLayout(tp * pp, tp, pp, ep=ep))
    world.platform.seed(0)
    return mesh


def _to_megatron(
    world: World, sizes: tuple[int, int], source: Path, target: Path, family_key: str | None
) -> None:
    with world.all_agree("reading the HF directory"):
        hf_config = read_config(source, family_key)
        family, shape = read_model(family_key, hf_config)
        dtypes, shapes = HfCheckpoint(source).dtypes, hf_shapes(family, shape)
        own = [name for name in shapes if name in dtypes and not is_kept_in_fp32(name)]
        dtype = dtypes[own[0]] if own else torch.float32  # `load_hf` reports missing tensors
        kept = None
        if passed_over(dtypes, shapes):
            kept = BaseReference(str(source.absolute()), None, None, weights_digest(source))
        model_source = ModelSource(
            family, hf_config, dtype, family_key or family.name, source, 0, passed_over=kept
        )
    mesh = _mesh(world, *sizes, model_source.shape)
    model = ParallelModel(mesh, model_source, "lm", TrainConfig())
    with world.all_agree("loading the weights"):
        load_hf(source, model.layout(), model.weights(), shapes)
    layout, files = layout_name(mesh.layout), model_source.files
    write_checkpoint(target, world, {"policy": model}, {}, files, layout=layout)


def _from_checkpoint(
    world: World,
    sizes: tuple[int, int],
    source: Path,
    target: Path,
    to: FileFormat,
    family_key: str | None,
    moved: Path | None,
) -> None:
    checkpoint, state = open_on_all_ranks(source, world)
    folder = checkpoint.folder
    with world.all_agree("reading the model's config"):
        hf_config = read_config(folder / HF_FILES)
        check_family(state.family, family_key, checkpoint.folder)
        check_adapter_conversion(checkpoint, state, to, moved)
        family, _ = read_model(state.family, hf_config)
    dtype = getattr(torch, state.dtype)
    lora = base = None
    if state.lora is not None:
        lora, base = state.lora.lora, state.lora.base.reference
    family, files = adapted(family, lora), folder / HF_FILES
    kept = None if state.passed_over is None else state.passed_over.reference
    model_source = ModelSource(
        family, hf_config, dtype, state.family, files, 0, base, kept, state.trains_mtp
    )
    # A reward model's checkpoint has no policy.
    head: Head = "lm" if (folder / "policy").is_dir() else "value"
    mesh = _mesh(world, *sizes, model_source.shape)
    model = ParallelModel(mesh, model_source, head, TrainConfig())
    if head == "value":
        model.read_scores(state.score_token)
        if state.score_token == BEFORE_LAST and world.rank == 0:
            say(f"{folder}: the reward model {OLD_SCORES}", sys.stdout)
    if base is not None:
        model.mark_trained()
        if to != PEFT_FORMAT:
            with world.all_agree("loading the base model", is_unbounded=True):
                _load_base(model, base, moved)
    load_model(checkpoint, "policy" if head == "lm" else "critic", model, world)
    if to == PEFT_FORMAT:
        export_peft(model, target, files)
        note = peft_notice(family, model_source.shape)
    else:
        export_model(model, target, files, moved=moved)
        note = merging_note(model)
    if note is not None and world.rank == 0:
        say(note, sys.stdout)


def _load_base(model: ParallelModel, base: BaseReference, moved: Path | None) -> None:
    """Loads the weights that adapters adapt; CheckpointError if missing or different."""
    if base.path is not None:
        section = ModelConfig(path=str(base_directory(base, moved)))
        load_weights(model, section, {VALUE_HEAD} if model.head == "value" else ())
        return
    assert base.seed is not None
    device = model.world.platform.device.type
    found = init_digest(model.source.hf_config, base.seed, device)
    if found != base.digest:
        remedy = "Convert on the kind of device on which the run was started."
        raise other_base(f"{base.named} on {device}", found, base, remedy)
    start_weights(model, base.seed)
