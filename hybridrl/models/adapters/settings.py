"""Reads the section `lora` into the settings of a model's adapters. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hybridrl.config.lora import LoraConfig
from hybridrl.errors import UserError
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.peft_directory import (
    CONFIG_FILE,
    check_peft,
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
