"""Reads settings, names and shapes of the adapters in a PEFT directory. No torch.

A PEFT directory contains adapter_config.json and adapter_model.safetensors. Its tensors have the
HF names of the weight table (rows.py), with a prefix. Each expert has its own tensors; PEFT stacks
them when it loads the directory for a model of transformers 5, which stacks experts.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.config.files import plain, read_json_object, shown
from hybridrl.config.wrapped_models import text_name
from hybridrl.errors import CheckpointError
from hybridrl.models.adapters.lora import ALL_LINEAR, EXPERTS, Lora
from hybridrl.models.adapters.rows import HF_A, HF_B
from hybridrl.models.boxes import Shape
from hybridrl.models.hf.headers import open_shard

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# Options of PEFT that change what an adapter computes, with the only values that are supported.
PLAIN_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "modules_to_save": ((), None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "target_parameters": ((), None),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "use_qalora": (False, None),
    "alora_invocation_tokens": (None,),
    "trainable_token_indices": (None,),
    "megatron_config": (None,),
}
OF_EXPERT = re.compile(r"\.experts\.\d+\.")
QUANTIZED = ("quant_state", "absmax", "qweight", "weight_format", "SCB")


@dataclass(frozen=True)
class PeftAdapter:
    """A PEFT directory.

    Args:
        lora: Settings of its adapters; `targets` are the names of the layers that have one.
        base: Name or path of the model that it was trained on; "" if the directory states none.
        stored_names: Name of each tensor in the file, by its name in the weight table. Models with
            images have other prefixes there.
    """

    directory: Path
    lora: Lora
    base: str
    shapes: Mapping[str, Shape]
    stored_names: Mapping[str, str]


def is_peft(directory: str | Path) -> bool:
    return os.path.isfile(Path(directory) / CONFIG_FILE)


def read_peft(directory: str | Path) -> PeftAdapter:
    """Reads a PEFT directory's settings and the names and shapes of its tensors.

    Raises CheckpointError, naming option or tensor, for a damaged or unsupported adapter.
    """
    folder = Path(os.path.expanduser(directory))
    lora = read_peft_config(folder)
    shapes: dict[str, Shape] = {}
    stored_names: dict[str, str] = {}
    with open_shard(folder / TENSOR_FILE, "numpy") as opened:
        for stored in opened.keys():  # noqa: SIM118 - a safe_open is not iterable
            name = text_name(stored.removeprefix(PREFIX))
            if not stored.startswith(PREFIX) or not name.endswith((f".{HF_A}", f".{HF_B}")):
                is_quantized = stored.endswith(QUANTIZED)
                raise _unexpected(folder, stored, "a quantized tensor" if is_quantized else "")
            if name in shapes:
                raise _named_twice(folder, stored_names[name], stored)
            shapes[name] = tuple(opened.get_slice(stored).get_shape())
            stored_names[name] = stored
    return PeftAdapter(folder, lora, read_base_name(folder), shapes, stored_names)


def check_peft(adapter: PeftAdapter, shapes: Mapping[str, Shape]) -> None:
    """Raises CheckpointError unless a PEFT directory contains exactly the adapters of a model."""
    for name in sorted(shapes.keys() | adapter.shapes.keys()):
        found, wanted = adapter.shapes.get(name), shapes.get(name)
        if found == wanted:
            continue
        raise CheckpointError(
            f"tensor {plain(name, 160)} in {adapter.directory}",
            "nothing" if found is None else f"shape {found}",
            "no such tensor" if wanted is None else f"shape {wanted}, as the model has it",
            "The adapter was trained on another model, or for other layers; choose the model that "
            "adapter_config.json names, and set lora.targets to the layers that it adapts.",
        )


def read_peft_config(folder: Path, full: tuple[str, ...] = ()) -> Lora:
    """Returns the settings of the adapters in a PEFT directory.

    Raises CheckpointError, naming the option, for a damaged file or an unsupported adapter.
    """
    config = read_json_object(folder / CONFIG_FILE, CheckpointError)
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise _refusal(folder, "peft_type", kind, "LORA")
    for key, allowed in PLAIN_OPTIONS.items():
        value = config.get(key)
        value = tuple(value) if isinstance(value, list) else value
        if value not in allowed:
            raise _refusal(folder, key, config[key], "null" if allowed[0] is None else allowed[0])
    rank, alpha = config.get("r"), config.get("lora_alpha", 8)
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise _refusal(folder, "r", rank, "a positive integer")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not math.isfinite(alpha):
        raise _refusal(folder, "lora_alpha", alpha, "a number")
    targets, layers = config.get("target_modules"), _adapted_layers(folder)
    if targets == ALL_LINEAR:
        targets = [ALL_LINEAR]
    elif isinstance(targets, str):  # a pattern; the tensors show what it matched
        targets = sorted({name for _, name in layers})
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise _refusal(folder, "target_modules", targets, f"{ALL_LINEAR}, a list, or a pattern")
    names = {name.rpartition(".")[2] for name in targets}
    if experts := {name for layer, name in layers if OF_EXPERT.search(f"{layer}.")}:
        others = {name for layer, name in layers if not OF_EXPERT.search(f"{layer}.")}
        names = names - (experts - others) | {EXPERTS}
    return Lora(rank, float(alpha), tuple(sorted(names)), bool(config.get("use_rslora")), full)


def _adapted_layers(folder: Path) -> set[tuple[str, str]]:
    """Returns the adapted layers: the name of the module around each, and the layer's own name."""
    with open_shard(folder / TENSOR_FILE, "numpy") as opened:
        names = [name.removesuffix(f".{HF_A}") for name in opened.keys() if name.endswith(HF_A)]  # noqa: SIM118
    return {(layer, name) for layer, _, name in (one.rpartition(".") for one in names)}


def read_base_name(folder: Path) -> str:
    """Returns the path or pinned hub name of the model that an adapter was trained on, or ""."""
    config = read_json_object(folder / CONFIG_FILE, CheckpointError)
    found, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(found, str):
        return ""
    is_pinned = isinstance(revision, str) and revision and "@" not in found
    return f"{found}@{revision}" if is_pinned and not os.path.exists(found) else found


def _refusal(folder: Path, key: str, value: object, allowed: object) -> CheckpointError:
    return CheckpointError(
        f"{folder / CONFIG_FILE}: {key}",
        "nothing" if value is None else shown(value),
        allowed if isinstance(allowed, str) else json.dumps(allowed),
        "hybridrl trains plain LoRA adapters; start from another adapter, or remove lora.path.",
    )


def _unexpected(folder: Path, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {plain(name, 160)} in {folder / TENSOR_FILE}",
        what or "an unknown tensor",
        f"tensors named {PREFIX}*.{HF_A} or *.{HF_B}",
        "Save the adapter with PEFT's save_pretrained, without other trained modules.",
    )


def _named_twice(folder: Path, first: str, second: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {plain(first, 160)} in {folder / TENSOR_FILE}",
        f"two tensors, also {plain(second, 160)}",
        "one tensor",
        "Both names are those of one adapter; save the adapter again with PEFT's save_pretrained.",
    )
