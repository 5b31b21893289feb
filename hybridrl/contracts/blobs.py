"""Blobs: named arrays of a sample that only some models understand, such as routed experts.

Imports no torch. The module that knows a kind of blob declares it once, with `declare`. Engines or
environments attach arrays of that kind to samples; exchange, gathering, saved rollouts, replay
files and micro-batches carry them unread.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Blobs = Mapping[str, Array]
"""The blobs of one sample, by name."""


@dataclass(frozen=True)
class BlobKind:
    """A declared kind of blob.

    Args:
        name: Name of the blob.
        dtypes: Names of the dtypes that its values may have.
        rows: Number of rows of a sample: `token`, one for each token of prompt and response;
            `input`, one for each token except the last, which is never an input of the engine;
            `any`.
        row_dims: Number of dimensions of a row.
    """

    name: str
    dtypes: tuple[str, ...]
    rows: Literal["token", "input", "any"]
    row_dims: int = 1

    def num_rows(self, num_tokens: int) -> int | None:
        """Returns the rows of a sample with `num_tokens` tokens; None if any number is allowed."""
        if self.rows == "any":
            return None
        return num_tokens - (self.rows == "input")


KINDS: dict[str, BlobKind] = {}


def declare(kind: BlobKind) -> BlobKind:
    """Declares a kind; raises ValueError if another kind has its name."""
    if KINDS.setdefault(kind.name, kind) != kind:
        raise ValueError(f"blob {kind.name} is already declared as {KINDS[kind.name]}")
    return kind


def misfit(name: str, dtype: str, num_dims: int) -> tuple[str, str] | None:
    """Returns a description of a wrong type of a blob's values and the allowed ones; None if the
    type is right.

    Args:
        name: Name of the blob.
        dtype: Name of the values' dtype.
        num_dims: Number of dimensions, including that of rows.
    """
    kind = KINDS.get(name)
    if kind is None:
        return f"blob {name}, which is not declared", ", ".join(sorted(KINDS)) or "no blob"
    if dtype not in kind.dtypes or num_dims != 1 + kind.row_dims:
        allowed = f"{' or '.join(kind.dtypes)} of {1 + kind.row_dims} dimensions"
        return f"{dtype} of {num_dims} dimensions", allowed
    return None


def blobs_to_json(blobs: Blobs) -> dict[str, Any]:
    """Returns the blobs of a sample as JSON-compatible values."""
    return {
        name: {
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii"),
        }
        for name, array in blobs.items()
    }


def blobs_from_json(fields: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the blobs of a saved sample, whose field `blobs` is the output of `blobs_to_json`.

    Old checkpoints have only routed experts, in a field `experts`.
    """
    experts = fields.get("experts")
    saved = fields.get("blobs", {} if experts is None else {"routed_experts": experts})
    return {
        name: np.frombuffer(base64.b64decode(blob["data"]), np.dtype(blob["dtype"]))
        .reshape(blob["shape"])
        .copy()
        for name, blob in saved.items()
    }
