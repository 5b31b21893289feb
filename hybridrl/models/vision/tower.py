"""Builds vision towers, which are modules of transformers, and computes their features."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from hybridrl.contracts.prompts import Content
from hybridrl.models.vision.images import GRID, ImageProcessor
from hybridrl.models.vision.shape import VisionShape

# Package of transformers and a tower's class in it, by `VisionShape.kind`. Older versions do not
# have all of them. transformers' own classes for models with experts have the same modules.
TOWERS: Mapping[str, tuple[str, str]] = {
    "qwen2_5_vl": ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
    "qwen3_vl": ("qwen3_vl", "Qwen3VLVisionModel"),
    "qwen3_5": ("qwen3_5", "Qwen3_5VisionModel"),
    "qwen3_vl_moe": ("qwen3_vl", "Qwen3VLVisionModel"),
    "qwen3_5_moe": ("qwen3_5", "Qwen3_5VisionModel"),
}


class Chunks:
    """The chunks of patches that attend to each other, grouped by length.

    A tower has two kinds of chunks at most: images and windows. All blocks use the same ones, so
    each kind is read on the host once per pass: a sync point.
    """

    def __init__(self) -> None:
        self._known: list[tuple[Tensor, list[tuple[int, Tensor]], Tensor | None]] = []

    def groups(self, ends_C: Tensor) -> tuple[list[tuple[int, Tensor]], Tensor | None]:
        """Returns the length and the patches of each group, and the order that undoes the grouping.

        Args:
            ends_C: Ends of the chunks, from 0.

        Returns:
            Patches are (N,), in the order of their chunks. The order is (P,), or None if there is
            only one group, whose patches are all in their places.
        """
        for known, groups, order in self._known:
            if known is ends_C:
                return groups, order
        ends = ends_C.tolist()
        starts: dict[int, list[int]] = {}
        for start, end in itertools.pairwise(ends):
            if end > start:
                starts.setdefault(end - start, []).append(start)
        groups = [
            (length, (torch.tensor(found)[:, None] + torch.arange(length)).flatten())
            for length, found in starts.items()
        ]
        order = None
        if len(groups) > 1:
            order = torch.argsort(torch.cat([patches for _, patches in groups])).to(ends_C.device)
            groups = [(length, patches.to(ends_C.device)) for length, patches in groups]
        self._known = [*self._known[-1:], (ends_C, groups, order)]
        return groups, order

    def attend(
        self, query_PHd: Tensor, key_PHd: Tensor, value_PHd: Tensor, ends_C: Tensor, scale: float
    ) -> Tensor:
        """Returns the output of attention for each patch, (P, H, d), in one call of the kernel for
        all chunks of equal length.
        """
        groups, order_P = self.groups(ends_C)
        outputs = []
        for length, patches_N in groups:
            query_CHLd, key_CHLd, value_CHLd = (
                (one if order_P is None else one.index_select(0, patches_N))
                .unflatten(0, (-1, length))
                .transpose(1, 2)
                for one in (query_PHd, key_PHd, value_PHd)
            )
            found_CHLd = torch.nn.functional.scaled_dot_product_attention(
                query_CHLd, key_CHLd, value_CHLd, scale=scale
            )
            outputs.append(found_CHLd.transpose(1, 2).flatten(0, 1))
        return outputs[0] if order_P is None else torch.cat(outputs).index_select(0, order_P)


class ChunkedAttention(torch.nn.Module):
    """Attention of a tower's block in one call for all chunks of equal length.

    transformers calls the kernel once per chunk: 64 times per block for the windows of an image
    with 1,024 tokens. Parameters have the same names.
    """

    def __init__(self, attention: Any, chunks: Chunks) -> None:
        super().__init__()
        self.qkv, self.proj = attention.qkv, attention.proj
        self._num_heads, self._scale = attention.num_heads, attention.scaling
        self._chunks = chunks

    def forward(
        self,
        hidden_PD: Tensor,
        cu_seqlens: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **_: Any,
    ) -> Tensor:
        """Returns the output for each patch, (P, D)."""
        num = len(hidden_PD)
        query_PHd, key_PHd, value_PHd = (
            self.qkv(hidden_PD).view(num, 3, self._num_heads, -1).unbind(1)
        )
        query_PHd, key_PHd = apply_rotary_pos_emb_vision(query_PHd, key_PHd, *position_embeddings)
        found_PHd = self._chunks.attend(query_PHd, key_PHd, value_PHd, cu_seqlens, self._scale)
        output_PD: Tensor = self.proj(found_PHd.flatten(1))
        return output_PD


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
    package, name = TOWERS[vision.kind]
    code = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    model = getattr(code, name)
    cuda = [device.index or 0] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), device:
        tower: Any = model._from_config(
            model.config_class(**vision.config), dtype=dtype, attn_implementation="sdpa"
        )
        chunks = Chunks()
        for block in tower.blocks:
            block.attn = ChunkedAttention(block.attn, chunks)
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
    tower: Any,
    processor: ImageProcessor,
    images: Sequence[Content],
    patches: Callable[[Content], NDArray[np.uint8]] | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Returns the features of the images' tokens, (N, D), and those that are added after the first
    decoder layers, each (N, D).

    Args:
        patches: Returns an image's patches; by default the processor's own function.
    """
    weight = tower.patch_embed.proj.weight
    parts = map(patches or processor.patches, images)
    values_PC = pixel_values(processor, parts, weight.dtype, weight.device)
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
