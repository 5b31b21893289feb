"""Draws the pictures of this example and creates its model directory, deterministically.

    python examples/pictures/make_data.py [FOLDER]

A picture has 4 x 4 cells, most of which contain a disc, a square or a cross in red, green or blue.
The task is to count the shapes of one colour: `How many red ?`. 512 pictures are held out to test
the model. `sft.jsonl` has demonstrations, and `train.jsonl` only answers, to other pictures. Rows
contain their picture as a data URI, so the files can be moved.
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
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
SHAPES = ("discs", "squares", "crosses")
WORDS = ("How", "many", "?", *COLOURS, *"0123456789")
CELLS, CELL = 4, 8  # cells in each direction, and pixels of a cell
MOST = 6  # highest number that is asked for
COUNTS = {"sft": 3000, "train": 6000, "heldout": 512}
SEED = 0


def draw(rng: random.Random, wanted: str, number: int) -> Image.Image:
    """Returns a picture with `number` shapes of the wanted colour."""
    others = [colour for colour in COLOURS if colour != wanted]
    num_others = rng.randint(2, CELLS * CELLS - number)
    colours = [wanted] * number + [rng.choice(others) for _ in range(num_others)]
    cells: list[tuple[str, str] | None] = [(colour, rng.choice(SHAPES)) for colour in colours]
    cells += [None] * (CELLS * CELLS - len(cells))
    rng.shuffle(cells)
    picture = Image.new("RGB", (CELLS * CELL, CELLS * CELL), "white")
    pen = ImageDraw.Draw(picture)
    for index, kind in enumerate(cells):
        if kind is None:
            continue
        colour, shape = COLOURS[kind[0]], kind[1]
        left, top = index % CELLS * CELL + 1, index // CELLS * CELL + 1
        box = (left, top, left + CELL - 3, top + CELL - 3)
        if shape == "discs":
            pen.ellipse(box, fill=colour)
        elif shape == "squares":
            pen.rectangle(box, fill=colour)
        else:
            pen.line(box, fill=colour, width=2)
            pen.line((box[0], box[3], box[2], box[1]), fill=colour, width=2)
    return picture


def data_uri(picture: Image.Image) -> str:
    """Returns a picture as a data URI."""
    target = io.BytesIO()
    picture.save(target, "PNG")
    return f"data:image/png;base64,{base64.b64encode(target.getvalue()).decode()}"


def rows(rng: random.Random, count: int, has_responses: bool) -> Iterator[dict[str, Any]]:
    """Yields rows. Every answer is equally frequent."""
    for index in range(count):
        wanted = rng.choice(list(COLOURS))
        number = index % (MOST + 1)
        answer = str(number)
        row = {
            "images": [data_uri(draw(rng, wanted, number))],
            "prompt": f"<image> How many {wanted} ?",
            "answer": answer,
        }
        yield row | ({"response": answer} if has_responses else {})


def write_rows(path: Path, made: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))


def write_model(folder: Path) -> None:
    """Writes the config.json of a Qwen3-VL with 0.6 M parameters, its tokenizer and processor."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *WORDS))}
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
            "patch_size": CELL // 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": hidden,
            "num_position_embeddings": (2 * CELLS) ** 2,
            "deepstack_visual_indexes": [0],
            "hidden_act": "gelu_pytorch_tanh",
        },
    }
    pixels = (CELLS * CELL) ** 2
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": CELL // 2,
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
