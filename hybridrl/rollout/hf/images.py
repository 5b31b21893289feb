"""Computes with images in the `hf` engine, for transformers' Qwen-VL models.

A prefill computes each image once, and places its features by the positions that the request names.
A drawn token is never an image, whatever its id. Tokens after an image have positions that differ
from their index by a constant for each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybridrl.contracts.prompts import Content
from hybridrl.errors import MISSING, ModelError
from hybridrl.models.vision.images import ImageProcessor, Preprocessing, position_offset, positions
from hybridrl.models.vision.shape import VisionShape
from hybridrl.models.vision.tower import image_features

Images = tuple[Content, ...]


class ImageModel:
    """A transformers model, such as Qwen3VLForConditionalGeneration, that reads images."""

    def __init__(self, model: Any, vision: VisionShape, directory: Path | None) -> None:
        self._model, self._vision, self._directory = model, vision, directory

    @cached_property
    def processor(self) -> ImageProcessor:
        if self._directory is None:
            raise ModelError("the model's directory", MISSING, "processor files", "Name one.")
        return ImageProcessor(self._vision, Preprocessing.read(self._directory, self._vision))

    def prefill(
        self, tokens_BL: Tensor, images_B: Sequence[Images], mask: Any, cache: Any, keep_U: Tensor
    ) -> Tensor:
        """Returns logits of contexts, padded on the right, at positions `keep_U`: (B, U, V)."""
        length, merge = tokens_BL.shape[1], self._vision.merge_size
        rows = [torch.from_numpy(positions(images, merge, length)) for images in images_B]
        position_3BL = torch.stack(rows).permute(2, 0, 1).to(tokens_BL.device)
        embedded_BLD = self._model.get_input_embeddings()(tokens_BL)
        more: dict[str, Any] = {}
        unique = {image.key: image for images in images_B for image in images}
        if unique:
            tower = self._model.model.visual
            features_ND, deep = image_features(tower, self.processor, list(unique.values()))
            first_row, num_rows = {}, 0
            for key, image in unique.items():
                first_row[key], num_rows = num_rows, num_rows + image.num_tokens
            row_BL = torch.full(tokens_BL.shape, -1)
            for row, images in zip(row_BL, images_B, strict=True):
                for image in images:
                    start = first_row[image.key]
                    row[image.start : image.end] = torch.arange(start, start + image.num_tokens)
            row_BL = row_BL.to(tokens_BL.device)
            is_image_BL = row_BL >= 0
            row_N = row_BL[is_image_BL]
            embedded_BLD[is_image_BL] = features_ND[row_N].to(embedded_BLD.dtype)
            if deep:
                more = {
                    "visual_pos_masks": is_image_BL,
                    "deepstack_visual_embeds": [one[row_N] for one in deep],
                }
        hidden_BLD = self._model.model.language_model(
            inputs_embeds=embedded_BLD,
            attention_mask=mask,
            position_ids=position_3BL,
            past_key_values=cache,
            use_cache=True,
            **more,
        ).last_hidden_state
        logits: Tensor = self._model.lm_head(hidden_BLD[:, keep_U])
        return logits

    def decode(
        self,
        tokens_B: Tensor,
        position_B: Tensor,
        images_B: Sequence[Images],
        mask: Any,
        cache: Any,
    ) -> Tensor:
        """Returns logits (B, V) after each row's last token, at index position_B in
        its sequence.
        """
        offsets = [position_offset(images, self._vision.merge_size) for images in images_B]
        position_B = position_B + torch.tensor(offsets, device=position_B.device)
        hidden_B1D = self._model.model.language_model(
            inputs_embeds=self._model.get_input_embeddings()(tokens_B[:, None]),
            attention_mask=mask,
            position_ids=position_B[None, :, None].expand(3, -1, 1),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        logits: Tensor = self._model.lm_head(hidden_B1D[:, -1])
        return logits
