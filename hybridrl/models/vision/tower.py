"""Builds the vision tower of Qwen3-VL, a module of transformers, and computes its features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3VLVisionModel
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from hybridrl.contracts.prompts import Content
from hybridrl.models.vision.images import GRID, ImageProcessor
from hybridrl.models.vision.shape import VisionShape

_NOT_SIZES = ("model_type", "architectures", "dtype", "torch_dtype", "transformers_version")


def build_tower(vision: VisionShape, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """Returns a tower with unset weights. The states of random generators do not change."""
    sizes = {key: value for key, value in vision.config.items() if key not in _NOT_SIZES}
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), device:
        tower: torch.nn.Module = Qwen3VLVisionModel._from_config(
            Qwen3VLVisionConfig(**sizes), dtype=dtype, attn_implementation="sdpa"
        )
    return tower


def pixel_values(
    processor: ImageProcessor, images: Sequence[Content], device: torch.device
) -> Tensor:
    """Returns what a tower reads, (P, C) float32, for the P patches of the images.

    A still image fills both frames of a patch. Bytes go to the device, and are normalized there.
    """
    frames = processor.vision.config.get("temporal_patch_size", 2)
    value_CB = torch.from_numpy(processor.channel_values()).to(device)
    parts = []
    for image in images:
        byte_PCHW = torch.from_numpy(processor.patches(image)).to(device, non_blocking=True).int()
        channels = [value_B[byte_PCHW[:, c]] for c, value_B in enumerate(value_CB)]
        patch_PCHW = torch.stack(channels, 1)
        parts.append(patch_PCHW[:, :, None].expand(-1, -1, frames, -1, -1).flatten(1))
    return torch.cat(parts)


def image_features(
    tower: Any, processor: ImageProcessor, images: Sequence[Content]
) -> tuple[Tensor, list[Tensor]]:
    """Returns the features of the images' tokens, (N, D), and those that are added after the first
    decoder layers, each (N, D).
    """
    weight = tower.patch_embed.proj.weight
    values_PC = pixel_values(processor, images, weight.device).to(weight.dtype)
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
    return found.pooler_output, list(found.deepstack_features)
