"""Pictures, their processor's files and prompts with them, for the tiny model qwen3_vl."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tiny_models import WITH_IMAGES
from torch import Tensor

from hybridrl.contracts.prompts import Content
from hybridrl.models.vision.images import ImageProcessor, Preprocessing

# Tiny models with images.
FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
TOKEN, START, END = (
    WITH_IMAGES[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end")
)
PREPROCESSING = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.5, 0.6, 0.7],
}


def save_processor(folder: Path, **change: Any) -> None:
    """Writes the file that describes the processing of images."""
    (folder / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSING, **change}))


def picture(seed: int, width: int, height: int) -> Image.Image:
    """Returns a picture of smooth random colours."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 255, (4, 5, 3), np.uint8))
    return small.resize((width, height), Image.Resampling.BICUBIC)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    """Returns the bytes of an image's file."""
    target = io.BytesIO()
    image.save(target, kind)
    return target.getvalue()


def processor_of(folder: Path, vision) -> ImageProcessor:
    return ImageProcessor(vision, Preprocessing.read(folder, vision))


def oracle_logits(
    oracle: Any, processor: Any, tokens: Tensor, images: Sequence[tuple[int, int, Image.Image]]
) -> Tensor:
    """Returns transformers' logits; `images` have the places of their tokens, start and end."""
    if not images:
        return oracle(input_ids=tokens[None]).logits[0]
    kinds = torch.zeros_like(tokens)
    for start, end, _ in images:
        kinds[start:end] = 1
    given = processor([image for *_, image in images], return_tensors="pt")
    # transformers takes every such token for an image; its embedding is looked up beforehand.
    positions, _ = oracle.model.get_rope_index(tokens[None], kinds[None], given["image_grid_thw"])
    found = oracle.model.get_image_features(given["pixel_values"], given["image_grid_thw"])
    embedded = oracle.get_input_embeddings()(tokens)[None]
    mask = (kinds == 1)[None]
    embedded = embedded.masked_scatter(mask[..., None], torch.cat(found.pooler_output))
    more: dict[str, Any] = {}
    if hasattr(found, "deepstack_features"):  # Qwen3-VL
        # transformers 5.12 returns one tensor for all images.
        deep = [
            one if isinstance(one, Tensor) else torch.cat(one) for one in found.deepstack_features
        ]
        more = {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}
    hidden = oracle.model.language_model(inputs_embeds=embedded, position_ids=positions, **more)
    return oracle.lm_head(hidden.last_hidden_state[0])


def with_images(
    processor: ImageProcessor, tokens: tuple[int, ...], places: dict[int, bytes]
) -> tuple[tuple[int, ...], tuple[Content, ...]]:
    """Returns tokens with images before some of their indices, and the images."""
    found: list[int] = []
    contents = []
    for index, token in enumerate(tokens):
        if index in places:
            content = processor.content(places[index])
            found.append(START)
            contents.append(replace(content, start=len(found)))
            found += [TOKEN] * content.num_tokens + [END]
        found.append(token)
    return tuple(found), tuple(contents)
