"""Reads the section `lora` into the settings of a model's adapters. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from hybridrl.config.lora import LoraConfig
from hybridrl.config.schema import ModelConfig
from hybridrl.config.starter import EXPORTED
from hybridrl.errors import UserError
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.peft_directory import (
    CONFIG_FILE,
    check_peft,
    read_base_name,
    read_peft,
    read_peft_config,
)
from hybridrl.models.adapters.rows import adapted, adapter_rules, only_adapters
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.trainable import PARTS
from hybridrl.models.weights import hf_shapes

DEFAULT_ALPHA = 32.0


def lora_of(section: LoraConfig) -> Lora | None:
    """Returns the settings of a run's adapters; None if it has none.

    Raises UserError if `lora.path` is not a directory with a usable PEFT adapter.
    """
    full = tuple(section.full)
    if section.path is not None:
        folder = Path(os.path.expanduser(section.path))
        if not (folder / CONFIG_FILE).is_file():
            allowed = f"a PEFT directory, which contains {CONFIG_FILE}"
            raise UserError("lora.path", section.path, allowed, "Correct the path.")
        return read_peft_config(folder, full)
    if section.rank is None:
        return None
    alpha = DEFAULT_ALPHA if section.alpha is None else section.alpha
    return Lora(section.rank, float(alpha), tuple(section.targets), section.rslora, full)


def base_notice(section: LoraConfig, model: ModelConfig) -> str | None:
    """Returns a notice if adapters of `lora.path` name another base model than the run's. Only the
    ends of both names are compared, because models are moved and stored under other paths.
    """
    if section.path is None:
        return None
    base = read_base_name(Path(os.path.expanduser(section.path)))
    name = model.path or model.init or ""
    if not base or _end_of_name(base) == _end_of_name(name):
        return None
    key = "model.path" if model.path else "model.init"
    return (
        f"the adapters of {section.path} were trained on {base}, as {CONFIG_FILE} says, but "
        f"{key} is {name}. On another model they compute something else, even if all shapes fit"
    )


def _end_of_name(name: str) -> tuple[str, ...]:
    """Returns the last part of a model's path or hub name; the last two of an exported run."""
    parts = PurePath(name.partition("@")[0].casefold()).parts
    if len(parts) > 2 and parts[-2] == "snapshots":  # in the hub's cache
        return (parts[-3].rpartition("--")[2],)
    return parts[-2 if parts[-1:] == (EXPORTED,) else -1 :]


def lora_rules(section: LoraConfig, family: Family, shape: ModelShape) -> Iterator[UserError]:
    try:
        lora = lora_of(section)
        if lora is None:
            return
        found = [*adapter_rules(lora, family, shape), *_full_rules(lora, family, shape)]
        yield from found
        if section.path is not None and not found:
            with_adapters = only_adapters(adapted(family, lora))
            check_peft(read_peft(section.path), hf_shapes(with_adapters, shape))
    except UserError as error:
        yield error


def _full_rules(lora: Lora, family: Family, shape: ModelShape) -> Iterator[UserError]:
    rows = family.rows(shape)
    for name in lora.full:
        is_part = PARTS.get(name)
        if is_part is None or any(map(is_part, rows)):
            continue  # unknown names violate a rule of the section
        remedy = "Remove it."
        if name == "head" and shape.tied_embeddings:
            remedy = "The model's output layer is its embedding: name embeddings to train both."
        yield UserError("lora.full", name, "parts that the model has", remedy)
