"""Images in SGLang: towers' padding, numbers, and refused models. No SGLang is needed."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_images import file_of, picture, save_processor
from tiny_models import tiny_model

from hybridrl.contracts.prompts import Content
from hybridrl.models.boxes import box_view, sizes
from hybridrl.models.family import Family, ModelShape, read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.vision.images import ImageProcessor, Preprocessing
from hybridrl.models.weights import check_layout, fused_layout
from hybridrl.rollout.common import image_pixels, installed_package
from hybridrl.rollout.engine import Request, SamplingParams
from hybridrl.rollout.model_rules import patch_rules
from hybridrl.rollout.sglang import images
from hybridrl.rollout.sglang.images import ImageNumbers, PixelTensors, with_padded_tower
from hybridrl.rollout.sglang.shared_prompts import SharedPrompts
from hybridrl.rollout.sglang.version import model_rules

SIZES = {
    "qwen3_vl": {"visual.pos_embed.weight": (64, 32), "layers.0.mlp.gate_up_proj.weight": None},
    "qwen2_5_vl": {
        "visual.blocks.0.mlp.gate_up_proj.weight": (2 * 48, 32),
        "visual.blocks.2.mlp.gate_up_proj.bias": (2 * 48,),
        "visual.blocks.1.mlp.down_proj.weight": (32, 48),
        "visual.blocks.1.mlp.down_proj.bias": None,
    },
}


def read(name: str, folder: Path, **change: Any) -> tuple[Family, ModelShape]:
    tiny_model(name, wide=True).config.save_pretrained(folder)
    config = read_config(folder, name)
    whole = config["_wrapper"]
    whole = {**whole, "vision_config": {**whole["vision_config"], **change}}
    return read_model(None, {**config, "_wrapper": whole})


@pytest.mark.parametrize("name", SIZES)
def test_towers_have_the_padding_of_sglang(name: str, tmp_path: Path) -> None:
    family, shape = read(name, tmp_path)
    plain = fused_layout(family, shape, 1, 0)
    padded = with_padded_tower(plain)
    check_layout(padded)
    for part, size in SIZES[name].items():
        (own,) = (one for one in plain.shapes if one.endswith(part))
        assert padded.shapes[own] == (size or plain.shapes[own])
    # Every element keeps its place within its HF tensor, and padding is what remains.
    assert [(one.hf, one.hf_box, one.local) for one in padded.regions] == [
        (one.hf, one.hf_box, one.local) for one in plain.regions
    ]
    assert [sizes(one.local_box) for one in padded.regions] == [
        sizes(one.local_box) for one in plain.regions
    ]
    tensors = {one: torch.zeros(size) for one, size in padded.shapes.items()}
    for region in padded.regions:
        box_view(tensors[region.local], region.local_box).fill_(1)
    for own, box in padded.padding:
        assert not box_view(tensors[own], box).any()


def test_sglang_pads_no_text_model(tmp_path: Path) -> None:
    tiny_model("qwen3").config.save_pretrained(tmp_path)
    family, shape = read_model(None, read_config(tmp_path, "qwen3"))
    layout = fused_layout(family, shape, 2, 1)
    assert with_padded_tower(layout) == layout


def test_numbers_of_images_are_never_used_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cache:
        num_cleared = 0

        def clear(self) -> None:
            self.num_cleared += 1

    cache, owner = Cache(), "hybridrl.rollout.sglang.images"
    monkeypatch.setattr(images, "embedding_cache", cache, raising=False)
    monkeypatch.setattr(images, "CACHE_OWNERS", ("hybridrl.no_such_module", owner))
    first, second = (Content("image", 1, 4, key) for key in ("a", "b"))
    numbers, others = ImageNumbers(), ImageNumbers()
    numbers.forget()
    assert cache.num_cleared == 0  # a text model's engine has no cache
    found = [numbers.of(first), numbers.of(second), others.of(first)]
    assert numbers.of(replace(first, start=9)) == found[0]
    numbers.forget()
    assert cache.num_cleared == 1
    assert len({*found, numbers.of(first), numbers.of(second)}) == 5


@pytest.fixture
def processor(tmp_path: Path) -> ImageProcessor:
    _, shape = read("qwen3_vl", tmp_path)
    save_processor(tmp_path)
    assert shape.vision is not None
    return ImageProcessor(shape.vision, Preprocessing.read(tmp_path, shape.vision))


def request_with(number: int, *contents: Content) -> Request:
    return Request(number, (5, 6, 7, 8), number, SamplingParams(), contents=contents)


def test_samples_wait_for_prompts_with_their_own_image_only() -> None:
    first, second = (Content("image", 1, 2, key) for key in ("a", "b"))
    queued = [request_with(number, one) for number, one in enumerate([first, second, first])]
    shared = SharedPrompts(worth_tokens=1)
    due = shared.due(queued, lambda number: False)
    assert [one.request_id for one in due] == [0, 1]


def test_requests_start_while_their_pixel_values_fit(
    processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [processor.content(file_of(picture(seed, 24, 24))) for seed in range(3)]
    pixels = PixelTensors(processor, torch.float32)
    one = pixels.values_of(contents[0]).nbytes
    assert one == 36 * 2 * 3 * 16 * 4  # patches, frames, channels, pixels, bytes
    held = pixels.values_of(contents[2])
    assert pixels.values_of(contents[2]) is held
    requests = [request_with(number, content) for number, content in enumerate(contents)]
    text, again = request_with(8), request_with(9, contents[0])
    monkeypatch.setattr(image_pixels, "MAX_PIXEL_BYTES", 2 * one)
    waiting = [again, *requests[1:], text]
    assert pixels.admitted(waiting, requests[:1]) == waiting[:2]
    assert pixels.admitted([text, *waiting], []) == [text, *waiting[:2]]
    monkeypatch.setattr(image_pixels, "MAX_PIXEL_BYTES", 1)
    assert pixels.admitted(waiting, []) == [again]  # whatever its size
    assert pixels.admitted(waiting, [text]) == []
    assert pixels.admitted([text], requests) == [text]


@pytest.mark.parametrize(
    ("sglang", "transformers", "is_refused"),
    [
        ("0.5.16", "5.12.1", False),
        ("0.5.16", "5.19.0", True),
        ("0.5.22", "5.19.0", False),
        ("0.5.23", "5.19.0", False),
        (None, "5.19.0", False),  # another rule reports that SGLang is missing
    ],
)
def test_old_versions_with_newer_transformers_are_refused(
    sglang: str | None,
    transformers: str,
    is_refused: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def version(name: str) -> str:
        found = {"sglang": sglang, "transformers": transformers}[name]
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(installed_package, "version", version)
    _, shape = read("qwen3_vl", tmp_path)
    found = list(model_rules(shape, "float32", True))
    assert [f"sglang {sglang}" in str(one.value) for one in found] == [True] * is_refused
    assert all("0.5.22" in str(one.allowed) for one in found)


def test_other_patches_of_qwen2_5_vl_are_refused(tmp_path: Path) -> None:
    _, shape = read("qwen2_5_vl", tmp_path)
    _, small = read("qwen2_5_vl", tmp_path, patch_size=4)
    assert not [*patch_rules("sglang", shape), *patch_rules("vllm", small)]
    (refused,) = patch_rules("sglang", small)
    assert "vision_config" in refused.name and refused.value == 3 * 2 * 4 * 4
    assert "1176" in str(refused.allowed) and "rollout.engine=vllm" in refused.remedy
