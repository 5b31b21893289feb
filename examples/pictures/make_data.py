"""Draws the pictures of this example and creates its model directory, deterministically.

    python examples/pictures/make_data.py [FOLDER]

A picture shows a disc, a square or a cross, in one of four colours and in one of four corners. The
question is `What colour ?`, `What shape ?` or `Which corner ?`. 512 pictures are held out to
test the model. `sft.jsonl` has demonstrations, and `train.jsonl` only answers, to other pictures.
Rows contain their picture as a data URI, so the files can be moved.
"""

from __future__ import annotations

import base64
import io
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<pad>", "<eos>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 200, 40),
}
SHAPES = ("disc", "square", "cross")
CORNERS = ("top-left", "top-right", "bottom-left", "bottom-right")
ANSWERS = {"What colour ?": tuple(COLOURS), "What shape ?": SHAPES, "Which corner ?": CORNERS}
SIDE, PATCH = 32, 4  # pixels of a picture and of a patch, in each direction
SIZES = (10, 14)  # of a shape, in pixels
COUNTS = {"sft": 3000, "train": 6000, "heldout": 512}
SEED = 0


def draw(rng: random.Random, colour: str, shape: str, corner: str) -> Image.Image:
    """Returns a picture of a shape, whose size and place within its corner are random."""
    picture = Image.new("RGB", (SIDE, SIDE), "white")
    pen, fill = ImageDraw.Draw(picture), COLOURS[colour]
    size, half, index = rng.randint(*SIZES), SIDE // 2, CORNERS.index(corner)
    left, top = (
        half * place + rng.randint(0, half - 1 - size) for place in (index % 2, index // 2)
    )
    box = (left, top, left + size, top + size)
    if shape == "disc":
        pen.ellipse(box, fill=fill)
    elif shape == "square":
        pen.rectangle(box, fill=fill)
    else:
        pen.line(box, fill=fill, width=size // 4)
        pen.line((left, top + size, left + size, top), fill=fill, width=size // 4)
    return picture


def data_uri(picture: Image.Image) -> str:
    """Returns a picture as a data URI."""
    target = io.BytesIO()
    picture.save(target, "PNG")
    return f"data:image/png;base64,{base64.b64encode(target.getvalue()).decode()}"


def rows(rng: random.Random, count: int, has_responses: bool) -> Iterator[dict[str, Any]]:
    """Yields rows. Every question is equally frequent."""
    for index in range(count):
        question = list(ANSWERS)[index % len(ANSWERS)]
        drawn = {one: rng.choice(answers) for one, answers in ANSWERS.items()}
        row = {
            "images": [data_uri(draw(rng, *drawn.values()))],
            "prompt": f"<image> {question}",
            "answer": drawn[question],
        }
        yield row | ({"response": drawn[question]} if has_responses else {})


def write_rows(path: Path, made: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))


def write_model(folder: Path) -> None:
    """Writes the config.json of a Qwen3-VL with 0.6 M parameters, its tokenizer and processor."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = (*ANSWERS, *map(" ".join, ANSWERS.values()))
    words = dict.fromkeys(" ".join(texts).split())
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *words))}
    hidden = 96
    config = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "image_token_id": vocab["<|image_pad|>"],
        "video_token_id": vocab["<pad>"],  # there are no videos
        "vision_start_token_id": vocab["<|vision_start|>"],
        "vision_end_token_id": vocab["<|vision_end|>"],
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "vocab_size": len(vocab),
            "hidden_size": hidden,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 256,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "max_position_embeddings": 128,
            "attention_bias": False,
            "initializer_range": 0.02,
            "eos_token_id": vocab["<eos>"],
            "pad_token_id": vocab["<pad>"],
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "in_channels": 3,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": (SIDE // PATCH) ** 2,
            "deepstack_visual_indexes": [0],
            "hidden_act": "gelu_pytorch_tanh",
        },
    }
    pixels = SIDE**2
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": pixels, "longest_edge": pixels},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "model_max_length": 128,
        "clean_up_tokenization_spaces": False,
    }
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {
        "config.json": config,
        "preprocessor_config.json": processor,
        "tokenizer_config.json": settings,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/pictures")
    write_model(folder / "model")
    rng = random.Random(SEED)
    for name, count in COUNTS.items():
        write_rows(folder / f"{name}.jsonl", rows(rng, count, has_responses=name == "sft"))
    print(f"{sum(COUNTS.values())} pictures in {folder}")


if __name__ == "__main__":
    main()
