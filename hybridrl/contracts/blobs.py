"""Defines blobs: named arrays in a sample that only some models understand, such as routed experts.

The module that understands a kind of blob declares it once. Engines and environments attach blobs
to samples; all other code passes them on unread. Does not import torch.
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
"""Blobs of one sample, by name."""


@dataclass(frozen=True)
class BlobKind:
    """Declaration of a kind of blob: its name, allowed dtypes and dimensions of a row.

    `rows` says how many rows a sample has. `token`: one for each token of prompt and response.
    `input`: one for each token except the last, which is never an input to the engine. `any`: any
    number.
    """

    name: str
    dtypes: tuple[str, ...]
    rows: Literal["token", "input", "any"]
    row_dims: int = 1

    def num_rows(self, num_tokens: int) -> int | None:
        """Returns the number of rows for `num_tokens` tokens; None if any number is allowed."""
        if self.rows == "any":
            return None
        return num_tokens - (self.rows == "input")


KINDS: dict[str, BlobKind] = {}


def declare(kind: BlobKind) -> BlobKind:
    """Declares a kind of blob. Raises ValueError if another kind has the same name."""
    if KINDS.setdefault(kind.name, kind) != kind:
        raise ValueError(f"blob {kind.name} is already declared as {KINDS[kind.name]}")
    return kind


def misfit(name: str, dtype: str, num_dims: int) -> tuple[str, str] | None:
    """Returns a blob's wrong type and the allowed types, as text; None if the type is allowed."""
    kind = KINDS.get(name)
    if kind is None:
        return f"blob {name}, which is not declared", ", ".join(sorted(KINDS)) or "no blob"
    if dtype not in kind.dtypes or num_dims != 1 + kind.row_dims:
        allowed = f"{' or '.join(kind.dtypes)} with {1 + kind.row_dims} dimensions"
        return f"{dtype} with {num_dims} dimensions", allowed
    return None


def blobs_to_json(blobs: Blobs) -> dict[str, Any]:
    return {
        name: {
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii"),
        }
        for name, array in blobs.items()
    }


def blobs_from_json(fields: Mapping[str, Any]) -> dict[str, Array]:
    """Restores the blobs of a saved sample from its field `blobs` (see `blobs_to_json`).

    Old checkpoints store only routed experts, in the field `experts`.
    """
    experts = fields.get("experts")
    saved = fields.get("blobs", {} if experts is None else {"routed_experts": experts})
    return {
        name: np.frombuffer(base64.b64decode(blob["data"]), np.dtype(blob["dtype"]))
        .reshape(blob["shape"])
        .copy()
        for name, blob in saved.items()
    }
