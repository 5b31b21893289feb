"""Tensors of a layout, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.models.hf.shards import stored_as
from hybridrl.models.weights import RankLayout


def allocate(layout: RankLayout, dtype: torch.dtype) -> dict[str, Tensor]:
    """Returns zero-filled CPU tensors for a layout, in `dtype` except for tensors kept in fp32."""
    types = {region.local: stored_as(region.hf, dtype) for region in layout.regions}
    return {n: torch.zeros(s, dtype=types.get(n, dtype)) for n, s in layout.shapes.items()}
