"""Declares the blobs with the likely tokens of each sampled position. Does not import torch.

The likely tokens of a position are the drawn token, followed by the most probable other tokens that
the engine could have drawn there, after temperature, top-k and top-p. Both blobs have one entry for
each likely token, and one entry before the tokens of each position: in `likely_tokens`, -1 minus
the index of the drawn token in the sample; in `likely_logps`, 0. Log-probabilities are those of the
distribution from which the engine drew. Positions ascend; a sample that continues on another engine
or in a later turn keeps its entries.
"""

from __future__ import annotations

import numpy as np

from hybridrl.contracts.blobs import Array, BlobKind, declare

LIKELY_TOKENS = declare(BlobKind("likely_tokens", ("int32",), rows="any", row_dims=0)).name
LIKELY_LOGPS = declare(BlobKind("likely_logps", ("float32",), rows="any", row_dims=0)).name
ENTRY_BYTES = 8  # of both blobs


def likely_entries(index: int, tokens_K: Array, logps_K: Array, num: int) -> dict[str, Array]:
    """Returns the entries of both blobs for the token at `index` of a sample.

    Args:
        tokens_K: The drawn token, followed by the most probable tokens, which may include it.
        logps_K: Their log-probabilities; -inf for tokens that could not be drawn.
        num: Number of most probable tokens to keep.
    """
    is_kept_K = (tokens_K != tokens_K[0]) & np.isfinite(logps_K)
    is_kept_K[num + 1 :] = False
    is_kept_K[0] = True
    return {
        LIKELY_TOKENS: np.concatenate(([-1 - index], tokens_K[is_kept_K])).astype(np.int32),
        LIKELY_LOGPS: np.concatenate(([0], logps_K[is_kept_K])).astype(np.float32),
    }
