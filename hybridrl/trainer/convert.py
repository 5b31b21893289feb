"""`hybridrl convert`: weights between HF directories and Megatron checkpoints, on the CPU or GPUs
of a few ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch

from hybridrl.checkpoint.folders import HF_FILES, find_checkpoint, read_state
from hybridrl.checkpoint.store import load_model, write_checkpoint
from hybridrl.config.schema import TrainConfig
from hybridrl.hybrid_engine.export import export_hf
from hybridrl.models.build import Head
from hybridrl.models.directory import read_config
from hybridrl.models.family import resolve_family
from hybridrl.models.hf import HfCheckpoint, load_hf
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World, start_process_group, stop_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.platform import Platform
from hybridrl.trainer.model import ModelSource, ParallelModel

TIMEOUT_S = 1800.0


def convert_rank(
    source: Path, target: Path, to: Literal["hf", "megatron"], tp: int, pp: int
) -> None:
    """Runs one rank of `hybridrl convert`.

    Args:
        source: HF directory for `to='megatron'`; checkpoint or run folder for `to='hf'`.
        target: folder to write; new or empty.
        to: the format to write.
        tp, pp: layout of the ranks that share the work and the memory; any layout reads the result.
    """
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, TIMEOUT_S)
    world = World(TrainLayout(tp * pp, tp, pp), platform, TIMEOUT_S)
    platform.seed(0)
    if to == "megatron":
        _to_megatron(world, source, target)
    else:
        _to_hf(world, source, target)
    stop_process_group()


def _to_megatron(world: World, source: Path, target: Path) -> None:
    with world.all_agree("reading the HF directory"):
        hf_config = read_config(source)
        family = resolve_family(None, hf_config)
        dtype = next(iter(HfCheckpoint(source).dtypes.values()))
        model_source = ModelSource(family, hf_config, dtype, family.name, source)
    model = ParallelModel(world, model_source, "lm", TrainConfig())
    shapes = hf_shapes(family, model_source.shape)
    with world.all_agree("loading the weights"):
        load_hf(source, model.layout(), model.weights(), shapes)
    write_checkpoint(target, world, {"policy": model}, {}, model_source.files)


def _to_hf(world: World, source: Path, target: Path) -> None:
    with world.all_agree("reading the checkpoint"):
        folder = find_checkpoint(source)
        state = read_state(folder)
        hf_config = read_config(folder / HF_FILES)
        family = resolve_family(state["family"], hf_config)
    dtype = getattr(torch, state["dtype"])
    model_source = ModelSource(family, hf_config, dtype, state["family"], folder / HF_FILES)
    # A reward model's checkpoint has no policy; HF's *ForSequenceClassification reads what comes.
    head: Head = "lm" if (folder / "policy").is_dir() else "value"
    if head == "value":
        hf_config = {**hf_config, "num_labels": 1}
    model = ParallelModel(world, model_source, head, TrainConfig())
    load_model(folder / ("policy" if head == "lm" else "critic"), model, world)
    export_hf(
        target,
        [model.layout_of(rank) for rank in range(world.size)],
        model.weights(),
        hf_shapes(family, model_source.shape, head),
        dtype,
        hf_config,
        rank=world.rank,
        side_files=folder / HF_FILES,
    )
