"""Builds models from the config section `model` and loads or initializes their weights."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from hybridrl.config.schema import Config, ModelConfig
from hybridrl.config.source import model_directory, read_model_config
from hybridrl.models.adapters.base_reference import base_reference
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.peft_directory import check_peft, read_peft
from hybridrl.models.adapters.peft_files import load_peft
from hybridrl.models.adapters.rows import adapted, base_of, only_adapters
from hybridrl.models.family import read_model
from hybridrl.models.hf.headers import HfHeaders
from hybridrl.models.hf.passed_over import passed_over
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.init import init_adapters, init_weights
from hybridrl.models.weights import VALUE_HEAD, Head, hf_shapes
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ModelSource, ParallelModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def model_source(
    config: ModelConfig,
    platform: Platform,
    longest: int | None = None,
    lora: Lora | None = None,
    seed: int = 0,
    is_exported: bool = False,
    trains_mtp: bool = False,
) -> ModelSource:
    """Reads the model's config.json and selects its family.

    Args:
        is_exported: Whether the model is trained and may be exported.
        trains_mtp: Whether the layer for multi-token prediction is trained (`train.mtp_coef`).
    """
    hf_config = read_model_config(config)
    dtype = platform.default_dtype() if config.dtype == "auto" else DTYPES[config.dtype]
    family, shape = read_model(config.family, hf_config)
    directory = model_directory(config, weights=False)
    if config.tokenizer is not None and Path(config.tokenizer).is_dir():
        directory = Path(config.tokenizer)
    name = config.family or family.name
    base = kept = None
    if lora is not None:
        base = base_reference(config, hf_config, seed, platform.device.type)
    if is_exported and config.path is not None:
        stored = HfHeaders(model_directory(config)).shapes
        if passed_over(stored, hf_shapes(family, replace(shape, has_mtp=trains_mtp))):
            kept = base or base_reference(config, hf_config, seed, platform.device.type)
    return ModelSource(
        adapted(family, lora), hf_config, dtype, name, directory, longest, base, kept, trains_mtp
    )


def build_model(
    mesh: Mesh, source: ModelSource, head: Head, config: Config, lender: ParallelModel | None = None
) -> ParallelModel:
    """Builds a model on a mesh, with weights from `model.path` or initialized from the seed.

    A critic starts from the policy's weights, with a value head that is all zeros. Adapters come
    from `lora.path`, or are initialized from the seed.

    Args:
        lender: Model with the same weights, whose frozen weights are used instead of a copy.
    """
    model = ParallelModel(mesh, source, head, config.train, lender)
    with mesh.world.all_agree("loading the weights"):
        if config.model.path is not None:
            load_weights(model, config.model, missing_ok={VALUE_HEAD} if head == "value" else ())
        else:
            start_weights(model, config.run.seed)
    if source.family.lora is not None:
        with mesh.world.all_agree("loading the adapters"):
            start_adapters(model, config.lora.path, config.run.seed)
    return model


def start_weights(model: ParallelModel, seed: int) -> None:
    """Initializes this rank's weights, except adapters, from the seed of the run."""
    if model.mesh.is_member:
        source, tensors, layout = model.source, model.own_weights(), model.own_layout()
        shapes = hf_shapes(base_of(source.family), model.shape, model.head)
        norm_weight = float(not source.shape.centered_norms)
        init_weights(layout, shapes, tensors, source.hf_config, seed, norm_weight)


def start_adapters(model: ParallelModel, path: str | None, seed: int) -> None:
    """Loads this rank's adapters from a PEFT directory; without one, draws A and zeroes B."""
    if not model.mesh.is_member:
        return
    layout, tensors = model.adapter_layout(), model.adapter_weights()
    shapes = hf_shapes(only_adapters(model.source.family), model.source.shape)
    if path is None:
        init_adapters(layout, shapes, tensors, seed)
        return
    adapter = read_peft(path)
    check_peft(adapter, shapes)
    load_peft(adapter, layout, tensors)


def load_weights(
    model: ParallelModel, section: ModelConfig, missing_ok: Collection[str] = ()
) -> None:
    """Loads this rank's shard of the weights from an HF directory or a hub name.

    Args:
        missing_ok: HF tensors that may be absent; the model keeps its values for them.
    """
    if model.mesh.is_member:
        shapes = hf_shapes(base_of(model.source.family), model.shape, model.head)
        directory, layout = model_directory(section), model.own_layout()
        load_hf(directory, layout, model.own_weights(), shapes, missing_ok=set(missing_ok))
