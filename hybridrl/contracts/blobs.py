"""Blobs: named arrays of a sample that only some models understand, such as routed experts.

Imports no torch. A kind of blob is declared once, with `declare`, by the module that knows what it
means. Engines or environments attach arrays of that kind to samples; exchange, gathering, saved
rollouts, replay files and micro-batches carry them unread.
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
        rows: Number of rows of a sample: `token`, one a token of prompt and response; `input`, one
            a token but the last, which is no input of the engine; `any`.
        row_dims: Number of dimensions of a row.
    """

    name: str
    dtypes: tuple[str, ...]
    rows: Literal["token", "input", "any"]
    row_dims: int = 1

    def num_rows(self, num_tokens: int) -> int | None:
        """Returns the rows of a sample of so many tokens; None where there may be any number."""
        if self.rows == "any":
            return None
        return num_tokens - (self.rows == "input")


KINDS: dict[str, BlobKind] = {}


def declare(kind: BlobKind) -> BlobKind:
    """Declares a kind; raises ValueError if another kind has its name."""
    if KINDS.setdefault(kind.name, kind) != kind:
        raise ValueError(f"blob {kind.name} is declared already, as {KINDS[kind.name]}")
    return kind


def misfit(name: str, dtype: str, num_dims: int) -> tuple[str, str] | None:
    """Returns what is wrong with the type of a blob's values, and what is allowed; None if it is
    right.

    Args:
        name: Name of the blob.
        dtype: Name of the values' dtype.
        num_dims: Number of dimensions, with that of rows.
    """
    kind = KINDS.get(name)
    if kind is None:
        return f"blob {name}, which is not declared", ", ".join(sorted(KINDS)) or "no blob"
    if dtype not in kind.dtypes or num_dims != 1 + kind.row_dims:
        allowed = f"{' or '.join(kind.dtypes)} of {1 + kind.row_dims} dimensions"
        return f"{dtype} of {num_dims} dimensions", allowed
    return None


def blobs_to_json(blobs: Blobs) -> dict[str, Any]:
    """Returns the blobs of a sample for JSON."""
    return {
        name: {
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii"),
        }
        for name, array in blobs.items()
    }


def blobs_from_json(fields: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the blobs of a saved sample, which has `blobs_to_json` of them as `blobs`.

    Checkpoints of before blobs have routed experts alone, as `experts`.
    """
    experts = fields.get("experts")
    saved = fields.get("blobs", {} if experts is None else {"routed_experts": experts})
    return {
        name: np.frombuffer(base64.b64decode(one["data"]), np.dtype(one["dtype"]))
        .reshape(one["shape"])
        .copy()
        for name, one in saved.items()
    }
