"""The blob of the experts that an engine chose for each token. No torch.

Its array is (P, K), with a row for each token of prompt and response except the last: the experts
of each layer that has experts, ascending, one layer after the other. K is the number of such layers
times the experts per token. A row comes from the forward pass that first computed its position;
neither a request that continues on another engine nor a later turn changes it.
"""

from __future__ import annotations

import numpy as np

from hybridrl.contracts.blobs import BlobKind, declare

ROUTED_EXPERTS = declare(BlobKind("routed_experts", ("uint8", "int16"), rows="input")).name
ONE_BYTE = 256  # experts that a byte can number


def experts_dtype(num_experts: int) -> type[np.uint8] | type[np.int16]:
    """Returns the narrowest dtype for expert numbers."""
    return np.uint8 if num_experts <= ONE_BYTE else np.int16
