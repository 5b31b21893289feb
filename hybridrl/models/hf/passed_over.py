"""Finds the tensors in an HF directory that training passes over: MTP layers and vision towers.

Exports contain them unchanged (`KeptTensors` in shards.py). No torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection

# Layers for multi-token prediction (MTP) that have their own prefix (Qwen3-Next and later), and
# the vision towers of multimodal models.
PREFIXES = ("mtp.", "model.mtp.", "visual.", "model.visual.")
# A layer for multi-token prediction after the last layer (DeepSeek-V3, GLM-4.5) contains a tensor
# with this name.
MTP_LAYER = re.compile(r"(model\.layers\.\d+\.)eh_proj\.weight$")


def passed_over(names: Collection[str], known: Collection[str]) -> tuple[str, ...]:
    """Returns the tensors that training passes over, in the order of `names`."""
    mtp = tuple(match[1] for name in names if (match := MTP_LAYER.match(name)))
    layers = tuple(layer for layer in mtp if not any(name.startswith(layer) for name in known))
    return tuple(
        name for name in names if name not in known and name.startswith((*PREFIXES, *layers))
    )
