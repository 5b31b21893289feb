"""Declares the blob with the experts that an engine chose for each token. Does not import torch.

The array is (P, K), with one row per token of prompt and response except the last token. A row
contains the experts of each MoE layer in ascending order, one layer after another. K is the number
of MoE layers times the number of experts per token. Each row comes from the forward pass that first
computed its position. A row does not change if the request continues on another engine or in a
later turn.
"""

from __future__ import annotations

import numpy as np

from hybridrl.contracts.blobs import BlobKind, declare

ROUTED_EXPERTS = declare(BlobKind("routed_experts", ("uint8", "int16"), rows="input")).name
ONE_BYTE = 256  # number of experts that one byte can distinguish


def experts_dtype(num_experts: int) -> type[np.uint8] | type[np.int16]:
    return np.uint8 if num_experts <= ONE_BYTE else np.int16
