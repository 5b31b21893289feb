"""Sizes of vision towers, and the weight rows of their tensors. Pure data, no torch.

A tower turns the patches of an image into features, which replace the embeddings of the image's
placeholder tokens. Every tensor-parallel rank of the first pipeline stage holds a whole tower,
whose modules are those of transformers, with fused gates as in engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

PARAMETER = "vision."
"""Prefix of a tower's Megatron parameters."""
GATE_UP = ".gate_up_proj."
"""Part of the name of a parameter that concatenates two tensors of files: gate_proj, up_proj."""


@dataclass(frozen=True)
class VisionShape:
    """Sizes of a vision tower.

    Args:
        kind: `model_type` of the model, which determines the tower's module.
        tensors: Shape of each of the tower's parameters, by its name in the tower's module.
        image_token: Id of the token that is repeated for an image in a prompt.
        start_token, end_token: Ids of the tokens before and after these tokens.
        patch_size: Width and height of a patch in pixels.
        merge_size: Number of patches, in each direction, that one token stands for.
        windowed_layers: Number of blocks whose patches attend within windows of the image.
        deepstack_layers: Number of decoder layers, from the first on, whose outputs receive
            features of the image too.
    """

    kind: str
    tensors: Mapping[str, tuple[int, ...]] = field(hash=False)
    image_token: int
    start_token: int
    end_token: int
    patch_size: int
    merge_size: int
    hidden_size: int = 0
    ffn_size: int = 0
    num_layers: int = 0
    windowed_layers: int = 0
    window_patches: int = 0
    deepstack_layers: int = 0
    config: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def num_parameters(self) -> int:
        return sum(map(prod, self.tensors.values()))
