"""Reads and writes the tensors of LoRA adapters in PEFT's format (peft_directory.py)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from hybridrl.config.hub import model_name
from hybridrl.config.wrapped_models import WRAPPED_PREFIX, wrapped_name
from hybridrl.errors import CheckpointError
from hybridrl.models.adapters.base_reference import BaseReference
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.peft_directory import CONFIG_FILE, PREFIX, TENSOR_FILE, PeftAdapter
from hybridrl.models.boxes import box_view
from hybridrl.models.hf.directory import copy_tokenizer
from hybridrl.models.hf.headers import open_shard
from hybridrl.models.hf.shards import CARD
from hybridrl.models.weights import RankLayout, check_tensors


def load_peft(adapter: PeftAdapter, layout: RankLayout, tensors: Mapping[str, Tensor]) -> None:
    """Reads a rank's part of the adapters into its tensors, cast to their types."""
    check_tensors(layout, {name: tuple(tensor.shape) for name, tensor in tensors.items()})
    with torch.no_grad(), open_shard(adapter.directory / TENSOR_FILE, "pt") as opened:
        for region in layout.regions:
            part = opened.get_slice(adapter.stored_names[region.hf])
            read = part[tuple(slice(start, stop) for start, stop in region.hf_box)]
            if not bool(read.isfinite().all()):
                raise CheckpointError(
                    f"tensor {region.hf} in {adapter.directory}",
                    "numbers that are not finite",
                    "finite numbers",
                    "Export the adapter again.",
                )
            box_view(tensors[region.local], region.local_box).copy_(read)


def write_peft(
    directory: str | Path,
    tensors: Mapping[str, Tensor],
    lora: Lora,
    base: BaseReference,
    side_files: Path | None = None,
    card: str | None = None,
    is_wrapped: bool = False,
) -> None:
    """Writes a PEFT directory, which is renamed to its final name when it is complete.

    Args:
        tensors: Whole adapter tensors by their names in the weight table, on the CPU.
        is_wrapped: Whether the model reads images, so that transformers nests its decoder.

    Raises CheckpointError if the directory exists and is not empty.
    """
    folder = Path(directory)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(
            str(folder),
            "a file or a folder with files",
            "a new or empty directory",
            "Choose another directory or remove this one.",
        )
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    hub_name = None if base.path is None else model_name(base.path)
    path = base.path and os.path.expanduser(base.path)
    if hub_name is not None:
        path = hub_name.repository
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": path,
        "revision": None if hub_name is None else hub_name.revision,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "use_rslora": lora.rslora,
        "target_modules": _targets(tensors, is_wrapped),
        "lora_dropout": 0.0,
        "bias": "none",
        "use_dora": False,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    rename = wrapped_name if is_wrapped else str
    named = {PREFIX + rename(name): tensor.contiguous() for name, tensor in tensors.items()}
    partial.mkdir(parents=True)
    try:
        (partial / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        if card is not None:
            (partial / CARD).write_text(card, encoding="utf-8")
        if side_files is not None:
            copy_tokenizer(side_files, partial)
        # safetensors would create the file so that only its owner can read it.
        (partial / TENSOR_FILE).write_bytes(save(named, metadata={"format": "pt"}))
        for file in partial.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _targets(tensors: Mapping[str, Tensor], is_wrapped: bool) -> list[str] | str:
    """Returns the adapted layers' names, or a pattern that leaves out those of a vision tower."""
    names = sorted({name.split(".")[-3] for name in tensors})
    if not is_wrapped:
        return names
    return rf"{re.escape(WRAPPED_PREFIX)}.*\.(?:{'|'.join(names)})"
