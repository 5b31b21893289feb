"""Rows with images, and the processing of images, against transformers' own."""

from __future__ import annotations

import base64
import io
import json
import random
import struct
import threading
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import PREPROCESSING, file_of, picture, save_processor
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from hybridrl.config.data import DataConfig
from hybridrl.config.evaluation import EvalSetConfig
from hybridrl.contracts.prompts import contents_from_bytes, contents_to_bytes
from hybridrl.data.evaluation_sets import set_rows
from hybridrl.data.images import ImageTokens, image_tokens, images_of
from hybridrl.data.mixture import hold_out
from hybridrl.data.prompt_store import PromptStore
from hybridrl.data.prompts import LoadedPrompts, Reading, load_prompts
from hybridrl.data.rows import Row
from hybridrl.data.supervised import _next_other
from hybridrl.errors import BadRowError, DataError, ModelError, UserError
from hybridrl.generation.saved_rollouts import prompt_digest
from hybridrl.generation.spread import _key
from hybridrl.models.megatron import image_inputs
from hybridrl.models.vision import decoding
from hybridrl.models.vision import images as vision_images
from hybridrl.models.vision.decoding import DecodedAhead
from hybridrl.models.vision.images import (
    FILE,
    GRID,
    ImageProcessor,
    Preprocessing,
    decoded,
    fitted_size,
    position_offset,
    positions,
)
from hybridrl.models.vision.shape import VisionShape
from hybridrl.models.vision.tower import pixel_values

VISION = VisionShape(
    "qwen3_vl", {}, image_token=3, start_token=2, end_token=4, patch_size=4, merge_size=2
)
WORDS = ("<pad>", "<eos>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "what", "is")
PICTURE = picture(1, 24, 16)
PNG = file_of(PICTURE)
NUM_TOKENS = 6  # of PNG: 24 x 16 pixels, one token for 8 x 8
TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}"
    "{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|>"
    "<|vision_end|>{% else %}{{ c.text }}{% endif %}{% endfor %} {% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    vocab = {word: number for number, word in enumerate((*WORDS, "[UNK]", "here"))}
    made = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    made.add_special_tokens(list(WORDS[:5]))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    found = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", pad_token="<pad>")
    found.chat_template = TEMPLATE
    return found


@pytest.fixture(scope="module")
def images(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> ImageTokens:
    folder = tmp_path_factory.mktemp("processor")
    save_processor(folder)
    return image_tokens(VISION, folder, tokenizer, max_pixels=1 << 20)


def load(tokenizer: Any, images: ImageTokens | None, *rows: Any, **knobs: Any) -> LoadedPrompts:
    responses = knobs.pop("max_response_tokens", None)
    config = DataConfig(**knobs)
    return load_prompts(config, tokenizer, list(rows), images=images, max_response_tokens=responses)


@pytest.mark.parametrize("size", [(17, 25), (8, 8), (64, 20), (200, 3), (33, 31), (5, 900)])
def test_pixels_are_those_of_transformers(images: ImageTokens, size: tuple[int, int]) -> None:
    image = picture(3, *size)
    content = images.processor.content(file_of(image))
    patches = images.processor.patches(content)
    ours = pixel_values(images.processor, [patches], torch.float32, torch.device("cpu")).numpy()
    theirs = Qwen2VLImageProcessorPil(**PREPROCESSING)(image, return_tensors="np")
    assert np.array_equal(content.arrays[GRID], theirs["image_grid_thw"][0])
    assert np.array_equal(ours, theirs["pixel_values"])
    assert content.num_tokens * 4 == len(ours)


def test_sizes_are_those_of_transformers() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        height, width = rng.randint(1, 3000), rng.randint(1, 3000)
        least, most = rng.choice([(64, 1024), (65536, 1 << 24), (3136, 1 << 20)])
        try:
            expected = smart_resize(height, width, 32, least, most)
        except ValueError:
            continue
        found = fitted_size(height, width, 32, least, most)
        assert found == expected
        if found[0] * found[1] <= most:  # engines resize once more
            assert fitted_size(*found, 32, least, most) == found


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    target = io.BytesIO()
    PICTURE.save(target, "PNG", exif=exif)
    return target.getvalue()


def test_images_of_all_kinds_become_rgb() -> None:
    clear = PICTURE.convert("RGBA")
    clear.putalpha(0)
    assert np.asarray(decoded(file_of(clear))).min() == 255, "transparent pixels are white"
    assert decoded(turned()).size == (16, 24)
    palette = PICTURE.quantize(16)
    assert np.array_equal(np.asarray(decoded(file_of(palette))), np.asarray(palette.convert("RGB")))
    grey = Image.fromarray(np.full((8, 8), 200 * 257, np.uint16))
    assert np.asarray(decoded(file_of(grey))).tolist()[0][0] == [200, 200, 200]
    cmyk = PICTURE.convert("CMYK")
    assert decoded(file_of(cmyk, "JPEG")).mode == "RGB"


URI = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
QUESTION = [{"role": "user", "content": "<image> what is here"}]
FORMS: dict[str, dict[str, Any]] = {
    "geo3k": {"images": [{"bytes": PNG, "path": None}], "problem": "<image> what is here"},
    "bytes": {"images": [PNG], "prompt": "<image> what is here"},
    "one": {"image": PNG, "prompt": "<image> what is here"},
    "numbered": {"image_1": PNG, "image_2": None, "prompt": "<image 1> what is here"},
    "no mark": {"images": [PNG], "prompt": " what is here"},
    "data uri": {"image": URI, "prompt": "<image> what is here"},
    "pillow": {"images": [PICTURE], "prompt": "<image> what is here"},
    "verl": {"images": [{"image": URI}], "prompt": QUESTION},
    "llava": {
        "image": PNG,
        "conversations": [{"from": "human", "value": "<image>\nwhat is here"}],
    },
    "openai": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": URI}},
                    {"type": "text", "text": " what is here"},
                ],
            }
        ]
    },
    "qwen": {
        "prompt": [
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": URI},
                    {"type": "text", "text": " what is here"},
                ],
            }
        ]
    },
    "trl": {
        "images": [PNG],
        "prompt": [
            {
                "role": "user",
                "content": [{"type": "image"}, {"type": "text", "text": " what is here"}],
            }
        ],
    },
}


@pytest.mark.parametrize("name", FORMS)
def test_rows_of_published_forms_have_their_image(
    name: str, tokenizer: Any, images: ImageTokens
) -> None:
    (prompt,) = load(tokenizer, images, FORMS[name], on_bad_row="stop").prompts
    assert prompt.tokens == (2, *[3] * NUM_TOKENS, 4, 5, 6, 8)
    (content,) = prompt.contents
    assert (content.kind, content.start, content.num_tokens) == ("image", 1, NUM_TOKENS)
    assert np.array_equal(np.asarray(decoded(content.arrays[FILE].tobytes())), np.asarray(PICTURE))
    assert contents_from_bytes(contents_to_bytes(prompt.contents)) == prompt.contents
    assert not {"images", "image", "image_1"} & prompt.columns.keys()
    json.dumps([prompt.given, prompt.columns])  # rewards receive them as JSON


def test_several_images_stand_at_their_marks(tokenizer: Any, images: ImageTokens) -> None:
    other = file_of(picture(2, 8, 8))
    rows = [
        {"images": [PNG, other], "prompt": "<image> what <image> is"},
        {"image_1": other, "image_2": PNG, "prompt": "<image 2> what <image 1> is"},
        {"images": [PNG, other], "prompt": "<image> what <image> is", "chosen": None},
    ]
    found = load(tokenizer, images, *rows, on_bad_row="stop").prompts
    expected = (2, *[3] * NUM_TOKENS, 4, 5, 2, 3, 4, 6)
    assert [prompt.tokens for prompt in found] == [expected] * 3
    assert found[0].contents == found[1].contents
    chat = load(tokenizer, images, rows[0], chat_template=True, on_bad_row="stop").prompts[0]
    assert chat.tokens == expected and chat.given == rows[0]["prompt"] or chat.given


def test_responses_learn_after_images(tokenizer: Any, images: ImageTokens) -> None:
    row = {"images": [PNG], "prompt": "<image> what", "response": "here"}
    (prompt,) = load(tokenizer, images, row, max_response_tokens=4, on_bad_row="stop").prompts
    assert prompt.response_tokens == (8, 1) and prompt.contents[0].start == 1
    messages = [*QUESTION, {"role": "assistant", "content": "here"}]
    chat = {"images": [PNG], "messages": messages}
    (prompt,) = load(tokenizer, images, chat, max_response_tokens=4, on_bad_row="stop").prompts
    assert prompt.tokens[:2] == (2, 3) and prompt.response_tokens[0] == 8  # type: ignore[index]


_TARGET = io.BytesIO()
PICTURE.save(_TARGET, "PNG", exif=b"Exif\0\0II*\0\x08")
DAMAGED_EXIF = _TARGET.getvalue()
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
# A small file whose header says 81 million pixels: it is refused before anything is decoded.
_HEADER = b"IHDR" + struct.pack(">II", 9000, 9000) + PNG[24:29]
HUGE = PNG[:12] + _HEADER + struct.pack(">I", zlib.crc32(_HEADER)) + PNG[33:]
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "too many pixels": (
        {"images": [HUGE], "prompt": "what"},
        "9000 x 9000 pixels; allowed|too large to decode",
    ),
    "a folder": ({"images": ["/tmp"], "prompt": "what"}, "which is no file in"),
    "an object in an object": (
        {"images": [{"image": {"image": {"image": {"image": PNG}}}}], "prompt": "what"},
        "images = ",
    ),
    "a picture of a slow format": ({"images": [b"%PDF-1.4 x"], "prompt": "what"}, "not an image"),
    "a list in a part": (
        {"prompt": [{"role": "user", "content": [{"type": "image", "image": [PNG]}]}]},
        "an image part = ",
    ),
    "more marks": ({"images": [PNG], "prompt": "<image> <image> what"}, "2 places for images, but"),
    "fewer marks": (
        {"images": [PNG, PNG], "prompt": "<image> what"},
        "1 place for an image, but 2",
    ),
    "no such number": ({"images": [PNG], "prompt": "<image 2> what"}, "<image 2>, but no"),
    "number 0": ({"images": [PNG], "prompt": "<image 0> what"}, "of the row's images: 1"),
    "a long number": ({"images": [PNG], "prompt": f"<image {'9' * 5000}> what"}, "but no image"),
    "damaged EXIF": ({"images": [DAMAGED_EXIF], "prompt": "what"}, "a damaged image"),
    "PostScript": ({"images": [EPS], "prompt": "what"}, "allowed: a PNG, JPEG"),
    "bare base64": ({"images": [URI[22:] * 90], "prompt": "what"}, "which is no file in"),
    "a device": ({"images": ["/dev/zero"], "prompt": "what"}, "which is no file in"),
    "a home": ({"images": ["~/a.png"], "prompt": "what"}, "which is no file in"),
    "a large URI": (
        {"images": ["data:image/png;base64," + "A" * 90_000_000], "prompt": "what"},
        "allowed: a file of at most 67108864 bytes",
    ),
    "an address": ({"image": "https://a.b/x?id=3", "prompt": "what"}, "https://a.b/x"),
    "a bucket": ({"image": "s3://a/b", "prompt": "what"}, "s3://a/b"),
    "no image": (
        {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
        "1 place for an image, but 0",
    ),
    "a mark without an image": ({"prompt": "<image> what"}, "in a row without an image"),
    "a path without an ending": ({"image": "a", "prompt": "<image> what"}, "without an image"),
    "truncated": ({"images": [PNG[:120]], "prompt": "what"}, "image 1: a damaged image"),
    "no picture": ({"images": [b"GIF what"], "prompt": "what"}, "8 bytes that are not an image"),
    "empty": ({"images": [b""], "prompt": "what"}, "0 bytes that are not an image"),
    "no file": ({"image": "missing.png", "prompt": "what"}, "which is no file in"),
    "a link": ({"images": ["https://example.org/a.png"], "prompt": "what"}, "https://example.org"),
    "base64": ({"image": "data:image/png;base64,@@", "prompt": "what"}, "Only base64|base64"),
    "no base64": ({"image": "data:image/png,abc", "prompt": "what"}, "no ;base64,"),
    "a number": ({"images": [7], "prompt": "what"}, "images = 7"),
    "an empty object": ({"images": [{"bytes": None}], "prompt": "what"}, "images = "),
    "too narrow": (
        {"images": [file_of(picture(1, 900, 2))], "prompt": "what"},
        "an image of 900 x 2 pixels",
    ),
    "a token in the text": (
        {"images": [PNG], "prompt": "<image> <|image_pad|>"},
        "2 placeholders of images in the prompt's tokens, for 1",
    ),
    "a token without an image": ({"prompt": "what <|image_pad|>"}, "1 placeholders of images"),
    "an image after the response": (
        {
            "images": [PNG],
            "messages": [
                {"role": "user", "content": "what"},
                {"role": "assistant", "content": "here"},
                {"role": "user", "content": [{"type": "image", "image": URI}]},
                {"role": "assistant", "content": "here"},
            ],
        },
        "an image after the first message",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_with_bad_images_are_dropped_and_counted(
    name: str, tokenizer: Any, images: ImageTokens
) -> None:
    row, message = BAD[name]
    good = {"images": [PNG], "prompt": "<image> what", "response": "here"}
    row = {"response": "here", **row} if "messages" not in row else row
    knobs = {"max_response_tokens": 4}
    found = load(tokenizer, images, good, row, **knobs)
    assert len(found.prompts) == 1 and found.left_out.num_bad == 1
    with pytest.raises(DataError, match=message) as caught:
        load(tokenizer, images, good, row, on_bad_row="stop", **knobs)
    assert caught.value.name == "prompts[1]"


def test_a_response_with_a_placeholder_is_bad(tokenizer: Any, images: ImageTokens) -> None:
    row = {"images": [PNG], "prompt": "<image> what", "response": "<|image_pad|>"}
    with pytest.raises(DataError, match="a response with the placeholder"):
        load(tokenizer, images, row, max_response_tokens=4)


def test_models_of_text_refuse_images_and_all_refuse_videos(
    tokenizer: Any, images: ImageTokens
) -> None:
    with pytest.raises(DataError, match="because the model reads no images"):
        load(tokenizer, None, FORMS["geo3k"])
    with pytest.raises(DataError, match="videos are not supported"):
        load(tokenizer, images, {"prompt": "what", "videos": ["a.mp4"]})
    assert load(tokenizer, None, {"prompt": "what", "image": "ubuntu:22.04"}).prompts
    (prompt,) = load(tokenizer, None, {"prompt": "what", "image_1": {"a": 1}}).prompts
    assert prompt.columns["image_1"] == {"a": 1}


def test_paths_are_relative_to_the_file_and_changes_are_noticed(
    tokenizer: Any, images: ImageTokens, tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.png").write_bytes(PNG)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"image": "photos/a.png", "prompt": "<image> what"}) + "\n")
    reading = Reading(DataConfig(prompts=(str(rows),)))

    def tokens() -> tuple[int, list[str]]:
        store = PromptStore(tokenizer, tmp_path / "kept", images=images)
        return len(store.load(reading).prompts[0].tokens), store.notes

    assert tokens()[0] == NUM_TOKENS + 3
    assert tokens() == (NUM_TOKENS + 3, []), "the file is used again"
    (tmp_path / "photos" / "a.png").write_bytes(file_of(picture(2, 8, 8)))
    num_tokens, notes = tokens()
    assert num_tokens == 4 and "folders that changed" in notes[0]


def test_paths_come_from_local_rows_only(images: ImageTokens, tmp_path: Path) -> None:
    (tmp_path / "0001").write_bytes(PNG)
    rows = Row(f"{tmp_path}/rows.jsonl:1", {})
    (tmp_path / "rows.jsonl").touch()
    for text in ("0001", str(tmp_path / "0001")):
        assert images_of(rows, {"image": text}).images == [str((tmp_path / "0001").resolve())]
    hub = replace(rows, place="datasets:a/b:train:7")
    for text in (str(tmp_path / "0001"), "../a.png", "file:///etc/hostname"):
        with pytest.raises(BadRowError, match="must not name files"):
            images_of(hub, {"image": {"path": text}})
    with (tmp_path / "large.png").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(BadRowError, match="67108865 bytes"):
        images_of(rows, {"image": "large.png"})


def test_large_images_are_scaled_down_and_count_as_tokens(tokenizer: Any, tmp_path: Path) -> None:
    save_processor(tmp_path)
    row = {"images": [file_of(picture(1, 64, 64))], "prompt": "<image> what"}
    small = image_tokens(VISION, tmp_path, tokenizer, max_pixels=256)
    (prompt,) = load(tokenizer, small, row).prompts
    assert prompt.contents[0].num_tokens == 4
    large = image_tokens(VISION, tmp_path, tokenizer, 1 << 20)
    with pytest.raises(DataError, match="all too long"):
        load(tokenizer, large, row, max_prompt_tokens=9)
    with pytest.raises(UserError, match=r"data.max_image_pixels: got 63; allowed: 64"):
        image_tokens(VISION, tmp_path, tokenizer, max_pixels=63)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 14}, "patch_size"),
        ({"image_processor_type": "CLIPImageProcessor"}, "image_processor_type"),
        ({"resample": 2}, "resample"),
        ({"image_std": [1]}, "image_std"),
        ({"size": {"longest_edge": "x"}}, "max_pixels"),
    ],
)
def test_other_processors_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**PREPROCESSING, **change}))
    with pytest.raises(ModelError, match=message):
        Preprocessing.read(tmp_path, VISION)
    with pytest.raises(ModelError, match="processor files"):
        Preprocessing.read(tmp_path / "none", VISION)


def test_positions_continue_after_the_longer_side(images: ImageTokens) -> None:
    content = replace(images.processor.content(PNG), start=2)  # 3 tokens wide, 2 high
    found = positions((content,), 2, 10)
    assert found.tolist() == [
        *[[0] * 3, [1] * 3],
        *[[2, 2 + row, 2 + column] for row in range(2) for column in range(3)],
        *[[5] * 3, [6] * 3],
    ]
    assert 9 + position_offset((content,), 2) == 6


def test_prompts_with_other_images_have_other_digests(images: ImageTokens) -> None:
    first, second = (images.processor.content(file_of(picture(i, 24, 16))) for i in (1, 2))
    digests = {prompt_digest((1, 2), one) for one in ((), (first,), (second,))}
    assert len(digests) == 3


def test_evaluation_sets_have_images(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    row = {"question": "<image 1> what?", "image_1": URI, "options": ["a", "b"], "answer": "B"}
    path.write_text(json.dumps(row) + "\n")
    section = EvalSetConfig(path=(str(path),), form="choices")
    (found,) = set_rows(section, DataConfig(), reads_images=True)
    assert found["image_1"] == PNG
    with pytest.raises(DataError, match="reads no images"):
        list(set_rows(section, DataConfig()))


def test_rows_of_mmmu_are_questions_with_choices(
    tokenizer: Any, images: ImageTokens, tmp_path: Path
) -> None:
    path, other = tmp_path / "set.jsonl", file_of(picture(2, 8, 8))
    row = {
        "question": "<image 1> what ?",
        "options": "['here', \"what's <image 2>\"]",
        "image_1": URI,
        "image_2": f"data:image/png;base64,{base64.b64encode(other).decode()}",
        "image_3": None,
        "answer": "B",
        "question_type": "multiple-choice",
    }
    path.write_text(json.dumps(row) + "\n")
    section = EvalSetConfig(path=(str(path),), form="choices", instruction="here")
    (found,) = set_rows(section, DataConfig(), reads_images=True)
    assert found["prompt"] == "<image 1> what ?\nA. here\nB. what's <image 2>\nhere"
    assert found["answer"] == "B"
    (prompt,) = load(tokenizer, images, found, on_bad_row="stop").prompts
    assert [one.num_tokens for one in prompt.contents] == [NUM_TOKENS, 1]
    for options in ("[]", "here", "{'A': 1}"):  # the first is that of questions without choices
        path.write_text(json.dumps({**row, "options": options}) + "\n")
        with pytest.raises(DataError, match="0 choices|not a list"):
            list(set_rows(section, DataConfig(), reads_images=True))


def test_evaluation_sets_keep_numbers_and_instructions(
    tokenizer: Any, images: ImageTokens, tmp_path: Path
) -> None:
    path, other = tmp_path / "set.jsonl", file_of(picture(2, 8, 8))
    row = {"question": "<image> what <image 3> is", "image": URI, "answer": "A", "options": ["a"]}
    row["image_3"] = f"data:image/png;base64,{base64.b64encode(other).decode()}"
    path.write_text(json.dumps(row) + "\n")
    section = EvalSetConfig(path=(str(path),), form="choices")
    (found,) = set_rows(section, DataConfig(), reads_images=True)
    (prompt,) = load(tokenizer, images, found, on_bad_row="stop").prompts
    assert [one.num_tokens for one in prompt.contents] == [NUM_TOKENS, 1]
    path.write_text(json.dumps(FORMS["openai"]) + "\n")
    section = EvalSetConfig(path=(str(path),), form="prompts", instruction="here")
    (found,) = set_rows(section, DataConfig(), reads_images=True)
    assert found["prompt"][-1]["content"][-1] == {"type": "text", "text": "\nhere"}  # type: ignore[index]


def test_long_rows_with_images_are_left_out(tokenizer: Any, images: ImageTokens) -> None:
    good = {"images": [PNG], "prompt": "<image> what"}
    long = {"images": [PNG], "prompt": "<image> " + "what " * 5000}
    left_out = load(tokenizer, images, good, long, max_prompt_tokens=20).left_out
    assert (left_out.num, left_out.num_bad) == (1, 0)


@pytest.mark.parametrize("kind", ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF"))
def test_files_of_all_formats_are_read(kind: str) -> None:
    image = Image.new("RGB", (20, 10), (0, 0, 255))
    found = vision_images.decoded(file_of(image, kind))
    assert found.size == (20, 10) and found.mode == "RGB"
    assert np.abs(np.asarray(found).astype(int) - np.asarray(image)).max() < 8


@pytest.mark.parametrize("most", (255, 65535))
def test_images_of_16_bits_are_converted_in_strips(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision_images, "STRIP_PIXELS", 50)
    values = np.random.default_rng(0).integers(0, most + 1, (33, 21), np.uint16)
    values[-1, -1] = most  # decides how all strips are scaled
    expected = (values / (257 if most > 255 else 1)).round()
    for kind in ("PNG", "TIFF"):
        found = np.asarray(vision_images.decoded(file_of(Image.fromarray(values), kind)))
        assert np.array_equal(found, np.repeat(expected[..., None], 3, axis=2))


def test_recent_images_are_decoded_once(images: ImageTokens, monkeypatch: Any) -> None:
    content = images.processor.content(file_of(picture(77, 24, 16)))
    first = images.processor.patches(content)
    monkeypatch.setattr(ImageProcessor, "resized", None)
    assert images.processor.patches(content) is first


def test_prompts_with_equal_words_and_other_pictures_differ(
    tokenizer: Any, images: ImageTokens
) -> None:
    """In what is held out, in the comparisons of KTO, and in the lengths that are remembered."""
    rows = [
        {"prompt": "<image> one two", "images": [file_of(picture(seed, 17, 25))]}
        for seed in range(8)
    ]
    loaded = load(tokenizer, images, *rows)
    assert len({prompt.tokens for prompt in loaded.prompts}) == 1
    kept, held = hold_out(loaded, 0.5)
    assert len(kept.prompts) + len(held) == 8 and kept.prompts and held
    first, second, *_ = prompts = loaded.prompts
    assert _next_other([first, first, second], 0) is second
    assert len({_key(prompt) for prompt in prompts}) == 8
    assert hold_out(load(tokenizer, images, *rows[:4]), 0.5)
    with pytest.raises(DataError, match="4 equal prompts"):
        hold_out(load(tokenizer, images, *[rows[0]] * 4), 0.5)


def test_images_are_decoded_ahead_in_other_threads(
    images: ImageTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once each, up to a number of bytes; those of requests that were given up make room."""
    processor, threads = images.processor, list[str]()
    decode = processor.patches

    def patches(content: Any) -> Any:
        threads.append(threading.current_thread().name)
        return decode(content)

    monkeypatch.setattr(processor, "patches", patches)
    monkeypatch.setattr(decoding, "MAX_AHEAD_BYTES", 2 * 24 * 24 * 3)
    ahead = DecodedAhead(processor)
    contents = [processor.content(file_of(picture(seed, 24, 24))) for seed in range(40, 44)]
    ahead.begin([*contents[:2], *contents[:2]])
    for started in ahead._started.values():
        started.result()
    assert len(threads) == 2 and all(name.startswith("images") for name in threads)
    for _ in range(3):  # every engine step asks again; the next ones are kept
        ahead.begin(contents)
        assert list(ahead._started) == [contents[0].key, contents[1].key]
    ahead.begin(contents[1:])  # the first request was given up
    assert list(ahead._started) == [contents[1].key, contents[2].key]
    ahead._started[contents[2].key].result()
    assert len(threads) == 3
    large = processor.content(file_of(picture(44, 60, 24)))
    assert processor.num_bytes(large) == decode(large).nbytes > decode(contents[0]).nbytes
    ahead.begin([large, contents[3]])  # together more than the limit
    assert list(ahead._started) == [large.key]
    monkeypatch.setattr(decoding, "MAX_AHEAD_BYTES", 1)
    ahead.begin(contents[3:])  # the first one is decoded, whatever its size
    assert list(ahead._started) == [contents[3].key]
    ahead._pool.shutdown()  # the next test counts what is decoded


def test_images_that_were_decoded_ahead_are_not_decoded_again(
    images: ImageTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if all of them exceed the memory of recent images."""
    processor, decodes = images.processor, list[int]()
    monkeypatch.setattr(vision_images, "_RECENT", vision_images.Recent(1))
    monkeypatch.setattr(decoding, "MAX_AHEAD_BYTES", 3 * 24 * 24 * 3)
    resized = ImageProcessor.resized

    def counted(self: ImageProcessor, content: Any) -> Any:
        decodes.append(1)
        return resized(self, content)

    monkeypatch.setattr(ImageProcessor, "resized", counted)
    contents = [processor.content(file_of(picture(seed, 24, 24))) for seed in range(50, 58)]
    ahead = DecodedAhead(processor)
    for index, content in enumerate(contents):
        for _ in range(3):
            ahead.begin(contents[index:])
        ahead.patches(content)
    assert len(decodes) == len(contents) and not ahead._started


def test_the_next_micro_batches_images_are_decoded_during_the_first_pass(
    images: ImageTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches without images, and those of an earlier batch that is gone, do not matter."""
    seen: list[list[str]] = []
    monkeypatch.setattr(
        DecodedAhead, "begin", lambda _, contents: seen.append([one.key for one in contents])
    )
    monkeypatch.setattr(image_inputs, "image_features", lambda *_: (torch.zeros(64, 4), []))
    contents = [images.processor.content(file_of(picture(seed, 24, 24))) for seed in range(60, 65)]
    keys = [one.key for one in contents]
    inputs = image_inputs.ImageInputs(images.processor.vision, None)
    inputs.__dict__["processor"] = images.processor
    given = [prepared_images(inputs, part) for part in (contents[:1], [], contents[1:3])]
    del given  # that batch is over
    given = [prepared_images(inputs, part) for part in (contents[2:4], [], contents[4:])]
    model = SimpleNamespace(
        vision=torch.nn.Linear(1, 1), config=SimpleNamespace(sequence_parallel=False)
    )
    for one in given:
        with torch.no_grad():
            inputs.embed(model, torch.zeros(8, 1, 4), {name: x.value for name, x in one.items()})
    assert seen == [keys[2:], keys[4:]]


def prepared_images(inputs: Any, contents: list[Any]) -> Any:
    """Returns what a micro-batch of one sample of 8 tokens with these images brings."""
    placed = tuple(replace(one, start=2 + index) for index, one in enumerate(contents))
    batch: Any = SimpleNamespace(contents_of=lambda _: placed)
    micro: Any = SimpleNamespace(
        positions_S=torch.arange(8), sequence_index_S=torch.zeros(8), sample_indices=[0]
    )
    return inputs.prepare(micro, batch)
