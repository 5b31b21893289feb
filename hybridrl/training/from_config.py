"""Builds models from the config section `model` and loads or initializes their weights."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from hybridrl.config.schema import Config, ModelConfig
from hybridrl.config.source import model_directory, read_model_config
from hybridrl.models.family import read_model
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.init import init_weights
from hybridrl.models.weights import VALUE_HEAD, Head, hf_shapes
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ModelSource, ParallelModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_source(
    config: ModelConfig, platform: Platform, longest: int | None = None
) -> ModelSource:
    """Reads the model's config.json and selects its family.

    Args:
        config: The section `model`.
        platform: Platform on which the model runs.
        longest: See `ModelSource`.
    """
    hf_config = read_model_config(config)
    dtype = platform.default_dtype() if config.dtype == "auto" else DTYPES[config.dtype]
    family, _ = read_model(config.family, hf_config)
    directory = model_directory(config, weights=False)
    if config.tokenizer is not None and Path(config.tokenizer).is_dir():
        directory = Path(config.tokenizer)
    name = config.family or family.name
    return ModelSource(family, hf_config, dtype, name, directory, longest)


def build_model(mesh: Mesh, source: ModelSource, head: Head, config: Config) -> ParallelModel:
    """Builds a model on a mesh, with weights from `model.path` or initialized from the seed.

    A critic starts from the policy's weights, with a value head that is all zeros.
    """
    model = ParallelModel(mesh, source, head, config.train)
    with mesh.world.all_agree("loading the weights"):
        if config.model.path is not None:
            load_weights(model, config.model, missing_ok={VALUE_HEAD} if head == "value" else ())
        elif mesh.is_member:
            shapes = hf_shapes(source.family, source.shape, head)
            tensors, norm_weight = model.weights(), float(not source.shape.centered_norms)
            seed = config.run.seed
            init_weights(model.layout(), shapes, tensors, source.hf_config, seed, norm_weight)
    return model


def load_weights(
    model: ParallelModel, section: ModelConfig, missing_ok: Collection[str] = ()
) -> None:
    """Loads this rank's shard of the weights from an HF directory or a hub name.

    Args:
        model: Model to load into.
        section: The section `model`.
        missing_ok: HF tensors that may be absent; the model keeps its values for them.
    """
    if model.mesh.is_member:
        shapes = hf_shapes(model.source.family, model.source.shape, model.head)
        directory = model_directory(section)
        load_hf(directory, model.layout(), model.weights(), shapes, missing_ok=set(missing_ok))
