"""The model from which training began, as checkpoints refer to it. No torch.

A checkpoint of a run with LoRA adapters does not contain the frozen weights, and no checkpoint
contains the tensors that training passes over. Such a checkpoint names the model instead, with a
digest that detects another model of the same name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.config.schema import ModelConfig
from hybridrl.config.source import model_directory
from hybridrl.errors import CheckpointError, UserError
from hybridrl.models.hf.headers import HfHeaders

DIGESTED_BYTES = 1 << 20  # bytes at each end of a weight file


@dataclass(frozen=True)
class BaseReference:
    """A model before training, without adapters.

    Args:
        path: HF directory, or hub name with its commit; None for initial weights.
        digest: Digest of the weights, as `weights_digest` or `init_digest` return it.
    """

    path: str | None
    init: str | None
    seed: int | None
    digest: str

    @property
    def named(self) -> str:
        return self.path or f"initial weights of {self.init} with seed {self.seed}"


def weights_digest(directory: Path) -> str:
    """Returns a digest of an HF directory's weight files that is cheap to compute.

    It covers each file's name and size, and the first and last MiB of its content. The first MiB
    contains the header with the names, shapes and types of the tensors. Training changes almost
    every element, so another training state differs in these parts. A change elsewhere in a file is
    not detected; reading all of a large model would take minutes.
    """
    found = hashlib.sha256()
    for file in sorted(set(HfHeaders(directory).files.values())):
        size = os.path.getsize(file)
        found.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            found.update(opened.read(DIGESTED_BYTES))
            opened.seek(max(size - DIGESTED_BYTES, 0))
            found.update(opened.read(DIGESTED_BYTES))
    return found.hexdigest()


def init_digest(hf_config: Mapping[str, Any], seed: int, device: str) -> str:
    """Returns a digest of all that determines initial weights, including the type of device."""
    content = [hf_config, seed, device]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def base_reference(
    section: ModelConfig, hf_config: Mapping[str, Any], seed: int, device: str
) -> BaseReference:
    if section.path is None:
        digest = init_digest(hf_config, seed, device)
        return BaseReference(None, section.init, seed, digest)
    return BaseReference(section.path, None, None, weights_digest(model_directory(section)))


def base_directory(base: BaseReference, moved: Path | None = None) -> Path:
    """Returns the HF directory of a base model; CheckpointError if it is missing or has changed."""
    assert base.path is not None
    remedy = "Pass the directory of the model from which training began with --base."
    if moved is not None and not os.path.isdir(moved):
        raise CheckpointError("--base", moved, "an HF directory", "Correct the path.")
    if moved is not None:
        directory = moved
    else:
        try:
            directory = model_directory(ModelConfig(path=base.path))
        except UserError as error:
            raise CheckpointError("base model", error.value, error.allowed, remedy) from None
    found = weights_digest(directory)
    if found != base.digest:
        raise other_base(str(directory), found, base, remedy)
    return directory


def other_base(key: str, found: str, base: BaseReference, remedy: str) -> CheckpointError:
    """Returns the error for weights that are not those of a base model."""
    return CheckpointError(
        f"weights of {key}",
        f"digest {found[:12]}",
        f"digest {base.digest[:12]}, as {base.named} had when training began",
        remedy,
    )
