"""Passes images to SGLang's scheduler, as pixel values that the trainer's own code has made.

SGLang's tokenizer manager would tokenize the prompt again, and resize and normalize images with
other code than the trainer. Here a request to the scheduler contains the prompt's tokens, the
vision tower's inputs, and the positions of all tokens. In SGLang's own copy of the prompt, each
image's placeholders are replaced by the image's number, which is larger than any token.
"""

from __future__ import annotations

import importlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import count
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.wrapped_models import VISUAL
from hybridrl.contracts.prompts import Content
from hybridrl.models.boxes import whole
from hybridrl.models.vision.images import GRID, position_offset, positions
from hybridrl.models.vision.shape import VisionShape
from hybridrl.models.vision.tower import Chunks
from hybridrl.models.weights import RankLayout, Region
from hybridrl.rollout.common.image_pixels import Pixels

# Modules that own SGLang's cache of features, which all engines of a process share: from 0.5.22 on,
# and before.
CACHE_OWNERS = ("sglang.srt.managers.mm_schedule", "sglang.srt.managers.mm_utils")
# Numbers of images, never used twice in a process.
_NUMBERS = count(1)
# Sizes that SGLang rounds up, by part of a tower parameter's name: the dim, the number of tensors
# that the parameter concatenates, and the multiple to which the size of each is rounded up.
ROUNDED = {
    "pos_embed.weight": (0, 1, 64),  # Qwen3-VL
    ".mlp.gate_up_proj.": (0, 2, 8),  # Qwen2.5-VL, 3,420 rows in published models
    ".mlp.down_proj.weight": (1, 1, 8),
}


def with_padded_tower(layout: RankLayout) -> RankLayout:
    """Returns an engine's layout with the elements that SGLang adds to a vision tower."""
    sizes: dict[str, tuple[int, int, int]] = {}  # dim, size before and after, by parameter
    shapes, padding = dict(layout.shapes), list(layout.padding)
    for name, shape in layout.shapes.items():
        found = (rule for part, rule in ROUNDED.items() if name.startswith(VISUAL) and part in name)
        for dim, num_parts, multiple in found:
            size = shape[dim] // num_parts
            rounded = -(-size // multiple) * multiple
            sizes[name] = dim, size, rounded
            shapes[name] = (*shape[:dim], num_parts * rounded, *shape[dim + 1 :])
            if rounded > size:
                for end in range(rounded, num_parts * rounded + 1, rounded):
                    box = list(whole(shape))
                    box[dim] = end - rounded + size, end
                    padding.append((name, tuple(box)))
    return RankLayout(
        tuple(
            _moved(one, *sizes[one.local]) if one.local in sizes else one for one in layout.regions
        ),
        shapes,
        tuple(padding),
    )


def _moved(region: Region, dim: int, size: int, rounded: int) -> Region:
    """Returns a region of a parameter whose concatenated tensors grow from `size` to `rounded`."""
    box = list(region.local_box)
    start, end = box[dim]
    shift = start // size * (rounded - size)
    box[dim] = start + shift, end + shift
    return replace(region, local_box=tuple(box))


def set_deepstack(model: Any, vision: VisionShape) -> None:
    """Makes a decoder receive features of an image after the layers that config.json names.

    Decoders with experts expect features after three layers, whatever config.json says (SGLang
    0.5.16 to 0.5.23).
    """
    if vision.deepstack_layers:
        model.model.deepstack_embed_to_decoder_layer = range(vision.deepstack_layers)


def attend_by_image(tower: torch.nn.Module) -> None:
    """Makes a tower on a CPU attend within images and windows, without masks.

    SGLang (0.5.16 to 0.5.23) computes all pairs of the patches of a pass, and keeps 128 masks of
    these pairs: 64 MiB each for 128 images of 16 tokens.
    """
    chunks = Chunks()
    for part in tower.modules():
        if hasattr(part, "qkv_backend"):
            backend: Any = part.qkv_backend
            backend.forward = partial(_attend, chunks, backend.scale)


def _attend(
    chunks: Chunks,
    scale: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bsz: int,
    cu_seqlens: Tensor,
    **_: Any,
) -> Tensor:
    return chunks.attend(q, k, v, cu_seqlens, scale)


def image_arguments() -> dict[str, Any]:
    return {
        # Every rank has a whole tower, as in training.
        "mm_enable_dp_encoder": True,
    }


class ImageNumbers:
    """Numbers under which SGLang caches images, and keys and values of their tokens.

    SGLang would derive numbers of 30 bits from hashes (0.5.16), which would coincide for two of
    some ten thousand images. Equal prompts with these images would then share keys and values.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def of(self, content: Content) -> int:
        """Returns an image's number, which is the same until the next call of `forget`."""
        return self._numbers.setdefault(content.key, next(_NUMBERS))

    def forget(self) -> None:
        """Drops the features of all images, which an earlier tower computed."""
        if self._numbers:
            self._numbers.clear()
            owner = next(name for name in CACHE_OWNERS if find_spec(name) is not None)
            importlib.import_module(owner).embedding_cache.clear()


class PixelTensors(Pixels[Tensor]):
    """Pixel values of requests' images, (P, C)."""

    def stored(self, content: Content, values_PC: Tensor) -> Tensor:
        return values_PC

    def inputs_of(
        self, contents: Sequence[Content], tokens: array[int], numbers: ImageNumbers
    ) -> Any:
        """Returns SGLang's description of the images in `tokens`: a prompt, and the tokens that its
        response already has.
        """
        from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

        items = [self._item(content, numbers.of(content)) for content in contents]
        padded = tokens.tolist()
        for content, item in zip(contents, items, strict=True):
            padded[content.start : content.end] = [item.pad_value] * content.num_tokens
        merge_size = self._processor.vision.merge_size
        position_LX = torch.from_numpy(positions(tuple(contents), merge_size, len(tokens)))
        offset = position_offset(tuple(contents), merge_size)
        return MultimodalProcessorOutput(
            mm_items=items,
            padded_input_ids=padded,
            im_token_id=self._processor.vision.image_token,
            mrope_positions=position_LX.T.contiguous(),
            mrope_position_delta=torch.tensor([[offset]]),
        )

    def _item(self, content: Content, number: int) -> Any:
        """Returns a description for one request, from which SGLang drops the values when the
        request ends.
        """
        from sglang.srt.managers.schedule_batch import (
            MM_PAD_SHIFT_VALUE,
            Modality,
            MultimodalDataItem,
        )

        return MultimodalDataItem(
            modality=Modality.IMAGE,
            hash=number,
            pad_value=MM_PAD_SHIFT_VALUE + number,
            offsets=[(content.start, content.end - 1)],  # SGLang's ends are inclusive
            feature=self.values_of(content),
            model_specific_data={"image_grid_thw": torch.from_numpy(content.arrays[GRID])[None]},
        )
