"""Declares the blob with images that an environment returned in a response. Does not import torch.

The array contains the bytes of `contents_to_bytes`. The images' places are among all tokens of the
sample: `start` counts from the first token of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybridrl.contracts.blobs import Array, BlobKind, Blobs, declare
from hybridrl.contracts.prompts import Content, contents_from_bytes, contents_to_bytes

RESPONSE_CONTENTS = declare(BlobKind("response_contents", ("uint8",), rows="any", row_dims=0)).name


def with_contents(blobs: Blobs, contents: Sequence[Content]) -> dict[str, Array]:
    """Returns a sample's blobs, and one more if its response has contents."""
    if not contents:
        return dict(blobs)
    return {**blobs, RESPONSE_CONTENTS: np.frombuffer(contents_to_bytes(contents), np.uint8)}


def without_contents(blobs: Blobs) -> tuple[dict[str, Array], tuple[Content, ...]]:
    """Returns what `with_contents` was given."""
    others = dict(blobs)
    saved = others.pop(RESPONSE_CONTENTS, None)
    return others, () if saved is None else contents_from_bytes(saved.tobytes())
