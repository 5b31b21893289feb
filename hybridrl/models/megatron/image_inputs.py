"""Images as inputs of a Megatron model: the vision tower on the first pipeline stage.

All ranks of the first stage hold a whole tower, and compute the features of all images of their
micro-batch. An image that occurs several times in a micro-batch is computed once. Features replace
the embeddings of the image's tokens before sequence parallelism splits them. Further features are
added to the outputs of the first decoder layers (deepstack; Meng et al. 2024, "DeepStack").

Tensor-parallel ranks compute the same gradients of the tower, because the backward pass of the
split gathers them. Context-parallel ranks compute parts of the sum, as for all parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import ReferenceType, ref

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from hybridrl.contracts.batch import RolloutBatch
from hybridrl.contracts.micro_batch import MicroBatch, ModelTensor
from hybridrl.contracts.prompts import Content
from hybridrl.contracts.response_contents import RESPONSE_CONTENTS
from hybridrl.errors import MISSING, ModelError
from hybridrl.models.inputs import ExtraInputs
from hybridrl.models.vision.decoding import DecodedAhead
from hybridrl.models.vision.images import ImageProcessor, Preprocessing, positions, random_image
from hybridrl.models.vision.shape import VisionShape
from hybridrl.models.vision.tower import empty_features, image_features

IMAGES, ROWS, DEEPSTACK = "images", "image_rows", "image_deepstack"
# Tokens per column and row of the images that compare engine and trainer; the first size that fits
# is used. Windows of Qwen2.5-VL have 4 x 4 tokens; the first size has several, some of them
# partial.
PROBED_SIZES = ((5, 6), (2, 3))


class MicroBatchImages:
    """Different images of a micro-batch.

    Attributes:
        following: Images of the micro-batch that was prepared next, if it has any.
    """

    def __init__(self, images: tuple[Content, ...]) -> None:
        self.images = images
        self.following: MicroBatchImages | None = None

    def then(self) -> Iterator[Content]:
        """Returns these images and those of all following micro-batches."""
        one: MicroBatchImages | None = self
        while one is not None:
            yield from one.images
            one = one.following


class ImageInputs(ExtraInputs):
    """Images of the prompts and responses in a micro-batch.

    Args:
        vision: Sizes of the tower.
        directory: Directory with the model's processor files, which are read with the first image.
    """

    blobs = (RESPONSE_CONTENTS,)
    needs_blobs = False
    needed_by = "the model's images"
    changes_embeddings = True
    num_position_rows = 3

    def __init__(self, vision: VisionShape, directory: Path | None) -> None:
        self._vision, self._directory = vision, directory
        self._last_prepared: ReferenceType[MicroBatchImages] | None = None

    @cached_property
    def processor(self) -> ImageProcessor:
        if self._directory is None:
            raise ModelError("the model's directory", MISSING, "processor files", "Name one.")
        rule = Preprocessing.read(self._directory, self._vision)
        return ImageProcessor(self._vision, rule)

    @cached_property
    def _decoded(self) -> DecodedAhead:
        return DecodedAhead(self.processor)

    def positions(self, batch: RolloutBatch, index: int, num_tokens: int) -> Tensor:
        found = positions(batch.contents_of(index), self._vision.merge_size, num_tokens)
        return torch.from_numpy(found)

    def prepare(self, micro: MicroBatch, batch: RolloutBatch) -> Mapping[str, ModelTensor]:
        """Returns the images, and for each position the row of its feature, or -1."""
        images: dict[str, Content] = {}
        first_row: dict[str, int] = {}
        row_S = torch.full_like(micro.positions_S, -1)
        num_rows = 0
        for index, sample in enumerate(micro.sample_indices):
            own = batch.contents_of(sample)
            if not own:
                continue
            row_L = torch.full((own[-1].end,), -1)
            for image in own:
                if image.key not in images:
                    images[image.key], first_row[image.key] = image, num_rows
                    num_rows += image.num_tokens
                start = first_row[image.key]
                row_L[image.start : image.end] = torch.arange(start, start + image.num_tokens)
            is_own_S = (micro.sequence_index_S == index) & (micro.positions_S < len(row_L))
            row_S[is_own_S] = row_L[micro.positions_S[is_own_S]]
        if not images:
            return {}
        prepared = MicroBatchImages(tuple(images.values()))
        last = None if self._last_prepared is None else self._last_prepared()
        if last is not None:
            last.following = prepared
        self._last_prepared = ref(prepared)
        return {
            IMAGES: ModelTensor(prepared),
            ROWS: ModelTensor(row_S, is_per_position=True),
        }

    def probe(
        self, tokens: tuple[int, ...], seed: int, max_tokens: int
    ) -> tuple[tuple[int, ...], tuple[Content, ...]]:
        if self._directory is None:
            return tokens, ()
        for sides in PROBED_SIZES:
            data = random_image(seed, self.processor.factor, *sides)
            image = self.processor.content(data)
            if (room := max_tokens - image.num_tokens - 2) >= 2:
                break
        else:
            return tokens, ()
        before, after = tokens[:room][: room // 2], tokens[:room][room // 2 :]
        start, end = (self._vision.start_token,), (self._vision.end_token,)
        pads = (self._vision.image_token,) * image.num_tokens
        placed = replace(image, start=len(before) + 1)
        return (*before, *start, *pads, *end, *after), (placed,)

    def embed(self, model: Any, embedded_S1D: Tensor, inputs: dict[str, Any]) -> Tensor:
        tower = model.vision
        is_trained = torch.is_grad_enabled() and any(p.requires_grad for p in tower.parameters())
        prepared: MicroBatchImages | None = inputs.get(IMAGES)
        if prepared is None and is_trained:
            # Megatron waits for a gradient of every parameter, whatever the micro-batch contains.
            return embedded_S1D + empty_features(tower, self._vision)
        if prepared is None:
            return embedded_S1D
        ahead = self._decoded
        ahead.begin(prepared.then())
        with torch.set_grad_enabled(is_trained):
            features_ND, deep = image_features(
                tower, self.processor, prepared.images, ahead.patches
            )
            row_S = inputs[ROWS]
            is_image_S11 = (row_S >= 0)[:, None, None]
            row_S = row_S.clamp(min=0)
            zero = features_ND.new_zeros(())
            added = [torch.where(is_image_S11, one[row_S][:, None], zero) for one in deep]
        placed_S1D = features_ND[row_S][:, None].to(embedded_S1D.dtype)
        embedded_S1D = torch.where(is_image_S11, placed_S1D, embedded_S1D)
        if model.config.sequence_parallel:
            group = model.pg_collection.tp
            added = [scatter_to_sequence_parallel_region(one, group=group) for one in added]
        if is_trained:
            leaves = [one.detach().requires_grad_() for one in added]
            embedded_S1D = _LateGradients.apply(embedded_S1D, leaves, *added)
            added = leaves
        inputs[DEEPSTACK] = added
        return embedded_S1D


class _LateGradients(torch.autograd.Function):
    """Passes embeddings on; its backward pass gives tensors the gradients of their copies.

    Layers read the copies, which are leaves. The layers' backward pass, which may recompute the
    layers one by one, then never enters the tower. This backward pass runs after those of all
    layers, so the tower is entered once, with the complete gradients.
    """

    @staticmethod
    def forward(ctx: Any, embedded_S1D: Tensor, leaves: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.leaves = leaves
        return embedded_S1D.view_as(embedded_S1D)

    @staticmethod
    def backward(ctx: Any, grad_S1D: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grads = tuple(leaf.grad for leaf in ctx.leaves)
        del ctx.leaves
        return grad_S1D, None, *grads


def add_deepstack(layers: Sequence[torch.nn.Module], vision: VisionShape) -> None:
    for index in range(vision.deepstack_layers):
        layers[index].register_forward_hook(partial(_add, index), with_kwargs=True)


def _add(
    index: int, _: torch.nn.Module, __: Any, kwargs: dict[str, Any], output: tuple[Tensor, ...]
) -> tuple[Tensor, ...] | None:
    packed = kwargs.get("packed_seq_params")
    added = None if packed is None else packed.model_inputs.get(DEEPSTACK)
    if added is None:
        return None
    hidden, *rest = output
    return hidden + added[index].to(hidden.dtype), *rest
