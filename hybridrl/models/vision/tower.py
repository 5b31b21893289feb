"""Builds vision towers, which are modules of transformers, and computes their features."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Qwen3VLVisionModel
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from hybridrl.contracts.prompts import Content
from hybridrl.models.vision.images import GRID, ImageProcessor
from hybridrl.models.vision.shape import VisionShape

# Classes of a tower and of its configuration, by `VisionShape.kind`.
TOWERS: Mapping[str, tuple[Any, Any]] = {
    "qwen2_5_vl": (Qwen2_5_VisionTransformerPretrainedModel, Qwen2_5_VLVisionConfig),
    "qwen3_vl": (Qwen3VLVisionModel, Qwen3VLVisionConfig),
    # transformers' own classes for it have the same modules.
    "qwen3_vl_moe": (Qwen3VLVisionModel, Qwen3VLVisionConfig),
}


class FusedGateMLP(torch.nn.Module):
    """SwiGLU of a tower's block, whose gate and up projections are one parameter, as in engines."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        gate = mlp.gate_proj
        self.gate_up_proj = torch.nn.Linear(
            gate.in_features,
            2 * gate.out_features,
            device=gate.weight.device,
            dtype=gate.weight.dtype,
        )
        self.down_proj, self.act_fn = mlp.down_proj, mlp.act_fn

    def forward(self, hidden_PD: Tensor) -> Tensor:
        """Returns the output for each patch, (P, D)."""
        gate_PF, up_PF = self.gate_up_proj(hidden_PD).chunk(2, -1)
        output_PD: Tensor = self.down_proj(self.act_fn(gate_PF) * up_PF)
        return output_PD


def build_tower(vision: VisionShape, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Returns a tower with unset weights. The states of random generators do not change."""
    model, config = TOWERS[vision.kind]
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), device:
        tower: Any = model._from_config(
            config(**vision.config), dtype=dtype, attn_implementation="sdpa"
        )
        for block in tower.blocks:
            if hasattr(block.mlp, "gate_proj"):
                block.mlp = FusedGateMLP(block.mlp)
    module: torch.nn.Module = tower
    return module


def pixel_values(
    processor: ImageProcessor,
    patches: Iterable[NDArray[np.uint8]],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Returns what a tower reads, (P, C) of `dtype`, for the P patches of several images.

    A still image fills both frames of a patch. Bytes go to the device, and are normalized there by
    a table, whose float32 values are rounded once.
    """
    frames = processor.vision.config.get("temporal_patch_size", 2)
    values_N = torch.from_numpy(processor.channel_values()).to(dtype).flatten().to(device)
    first_C = torch.arange(3, dtype=torch.int32, device=device)[:, None, None] * 256
    parts = []
    for of_image in patches:
        byte_PCHW = torch.from_numpy(of_image).to(device, non_blocking=True)
        index_PCHW = byte_PCHW + first_C
        patch_PCHW = values_N.index_select(0, index_PCHW.flatten()).view(index_PCHW.shape)
        parts.append(patch_PCHW[:, :, None].expand(-1, -1, frames, -1, -1).flatten(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def image_features(
    tower: Any, processor: ImageProcessor, images: Sequence[Content]
) -> tuple[Tensor, list[Tensor]]:
    """Returns the features of the images' tokens, (N, D), and those that are added after the first
    decoder layers, each (N, D).
    """
    weight = tower.patch_embed.proj.weight
    values_PC = pixel_values(processor, map(processor.patches, images), weight.dtype, weight.device)
    grids = torch.tensor([image.arrays[GRID].tolist() for image in images], device=weight.device)
    return _run(tower, values_PC, grids)


def empty_features(tower: Any, vision: VisionShape) -> Tensor:
    """Returns a zero that depends on all of a tower's parameters, so that each has a gradient."""
    weight = tower.patch_embed.proj.weight
    merge = vision.merge_size
    values_PC = weight.new_zeros(merge * merge, weight[0].numel())
    grids = torch.tensor([[1, merge, merge]], device=weight.device)
    features, deep = _run(tower, values_PC, grids)
    total: Tensor = sum((one.sum() for one in deep), features.sum()) * 0
    return total


def _run(tower: Any, values_PC: Tensor, grids: Tensor) -> tuple[Tensor, list[Tensor]]:
    # transformers reads the grids on the host: a sync point, once per pass of the tower.
    found = tower(values_PC, grid_thw=grids, return_dict=True)
    return found.pooler_output, list(getattr(found, "deepstack_features", ()))
