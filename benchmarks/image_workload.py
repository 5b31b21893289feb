"""Prompts with synthetic images, their tokenizer and processor, for models with random weights."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from random_workload import random_prompts, word_tokenizer
from transformers import PreTrainedTokenizerFast

SPECIAL = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
NUM_MARKS = 2  # tokens before and after an image


def image_model(model: str, folder: str) -> str:
    """Writes a model's config.json and its processor's file into a folder that it returns."""
    config = json.loads(Path(model).read_text())
    vision, place = config["vision_config"], Path(folder, "model")
    place.mkdir(exist_ok=True)
    (place / "config.json").write_text(json.dumps(config))
    rules = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision["patch_size"],
        "merge_size": vision["spatial_merge_size"],
        "temporal_patch_size": vision["temporal_patch_size"],
        "size": {"shortest_edge": 1 << 12, "longest_edge": 1 << 24},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (place / "preprocessor_config.json").write_text(json.dumps(rules))
    return str(place)


def side_of(model: str, image_tokens: int) -> int:
    """Returns the width and height in pixels of a square image with so many tokens."""
    vision = json.loads(Path(model, "config.json").read_text())["vision_config"]
    tokens = math.isqrt(image_tokens)
    if tokens**2 != image_tokens:
        raise SystemExit(f"--image-tokens {image_tokens}: choose a square, such as 1024")
    return int(tokens * vision["patch_size"] * vision["spatial_merge_size"])


def image_prompts(
    number: int, num_tokens: int, vocab_size: int, model: str, image_tokens: int
) -> list[dict[str, Any]]:
    """Returns random prompts of so many tokens, each with an image that no other has."""
    side = side_of(model, image_tokens)
    rows = random_prompts(number, num_tokens - image_tokens - NUM_MARKS, vocab_size)
    return [
        {**row, "prompt": f"<image> {row['prompt']}", "images": [picture(seed, side)]}
        for seed, row in enumerate(rows)
    ]


def picture(seed: int, side: int) -> bytes:
    """Returns the JPEG file of a square picture with smooth random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (16, 16, 3), np.uint8)
    image = Image.fromarray(colours).resize((side, side), Image.Resampling.BICUBIC)
    target = io.BytesIO()
    image.save(target, "JPEG", quality=90)
    return target.getvalue()


def image_tokenizer(vocab_size: int, model: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with a word for each token, and with the special tokens of images."""
    config = json.loads(Path(model, "config.json").read_text())
    names = {config[key]: f"<|{key.removesuffix('_token_id')}|>" for key in SPECIAL}
    return word_tokenizer(vocab_size, names)
