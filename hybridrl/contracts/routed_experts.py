"""Which experts an engine chose for each token: the arrays, and how they are saved. No torch.

An array is (P, K), of a sample's first P positions, prompt and response together: the experts of
each layer with experts, ascending, one layer after the other, so that K is their number times the
experts of a token. Row p is the choice for the hidden state at position p. A finished response of
n tokens to a prompt of m has m + n - 1 rows: its last token was never an input of the engine, and
predicts nothing. A row is that of the pass in which its position was first computed: neither a
request that continues elsewhere nor a later turn changes it.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[Any]
ONE_BYTE = 256  # experts that a byte can number


def experts_dtype(num_experts: int) -> type[np.uint8] | type[np.int16]:
    """Returns the narrowest type of expert numbers."""
    return np.uint8 if num_experts <= ONE_BYTE else np.int16


def experts_to_json(experts: Experts | None) -> dict[str, Any] | None:
    """Returns an array for JSON."""
    if experts is None:
        return None
    data = base64.b64encode(np.ascontiguousarray(experts).tobytes()).decode("ascii")
    return {"shape": list(experts.shape), "dtype": experts.dtype.name, "data": data}


def experts_from_json(saved: Mapping[str, Any] | None) -> Experts | None:
    """Returns what `experts_to_json` was given."""
    if saved is None:
        return None
    flat = np.frombuffer(base64.b64decode(saved["data"]), np.dtype(saved["dtype"]))
    return flat.reshape(saved["shape"]).copy()


def token_rows(experts: Sequence[Experts]) -> Experts:
    """Returns the rows of all tokens of finished samples, (T, K), zeros for each last one."""
    last = np.zeros((1, experts[0].shape[1]), experts[0].dtype)
    return np.concatenate([part for one in experts for part in (one, last)])
