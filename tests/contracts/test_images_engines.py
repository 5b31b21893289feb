"""Engines with images: greedy responses are those of transformers' generate, after two updates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import write_weights
from tiny_images import file_of, picture, processor_of, save_processor, with_images
from tiny_models import save_tiny_models, tiny_model
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hybridrl.models.family import read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.vision.images import FILE, decoded
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.rollout.hf.adapter import HfEngine

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
# Images of each prompt: the token before which each stands, and its seed, width and height.
PROMPTS: list[dict[int, tuple[int, int, int]]] = [
    {1: (1, 17, 25)},
    {},
    {0: (2, 40, 24), 2: (1, 17, 25)},
    {2: (3, 8, 8)},
    {1: (1, 17, 25)},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("images")
    save_tiny_models(root, ("qwen3_vl",))
    save_processor(root / "qwen3_vl")
    return root / "qwen3_vl"


@pytest.fixture(scope="module")
def engine(folder: Path) -> Any:
    hf_config = read_config(folder)
    family, _ = read_model(None, hf_config)
    return HfEngine(hf_config, "float32", "cpu", 3, family, directory=folder)


def requests(folder: Path) -> list[Request]:
    _, shape = read_model(None, read_config(folder))
    processor, made = processor_of(folder, shape.vision), []
    for number, places in enumerate(PROMPTS):
        generator = torch.Generator().manual_seed(number % 4)
        tokens = tuple(torch.randint(2, 180, (3 + number % 4,), generator=generator).tolist())
        files = {at: file_of(picture(*one)) for at, one in places.items()}
        tokens, contents = with_images(processor, tokens, files)
        made.append(Request(number, tokens, number, GREEDY, contents=contents))
    return made


def expected(model: Any, folder: Path, request: Request) -> tuple[list[int], list[float]]:
    """Returns transformers' greedy tokens and their log-probabilities."""
    tokens = torch.tensor(request.prompt)
    given: dict[str, Any] = {}
    if request.contents:
        kinds = torch.zeros_like(tokens)
        for content in request.contents:
            kinds[content.start : content.end] = 1
        files = [decoded(content.arrays[FILE].tobytes()) for content in request.contents]
        processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
        given = {**processor(files, return_tensors="pt"), "mm_token_type_ids": kinds[None]}
    model.model.rope_deltas = None
    found = model.generate(
        input_ids=tokens[None],
        attention_mask=torch.ones_like(tokens)[None],
        do_sample=False,
        max_new_tokens=GREEDY.max_new_tokens,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **given,
    )
    drawn = found.sequences[0, len(tokens) :].tolist()
    logps = [
        float(logits[0].log_softmax(-1)[token])
        for logits, token in zip(found.logits, drawn, strict=True)
    ]
    return drawn, logps


def test_greedy_equals_transformers_after_two_updates(engine: Any, folder: Path) -> None:
    asked = requests(folder)
    for seed in (1, 2):
        model = tiny_model("qwen3_vl", seed).eval()
        write_weights(engine, model, version=seed)
        for request, done in zip(asked, generate(engine, asked), strict=True):
            tokens, logps = expected(model, folder, request)
            assert list(done.tokens) == tokens, request.request_id
            assert done.logps == pytest.approx(logps, abs=1e-5)


def test_equal_tokens_with_other_images_have_other_responses(engine: Any, folder: Path) -> None:
    write_weights(engine, tiny_model("qwen3_vl", 1), version=3)
    request = requests(folder)[0]
    _, shape = read_model(None, read_config(folder))
    processor = processor_of(folder, shape.vision)
    (content,) = request.contents
    other = replace(processor.content(file_of(picture(9, 17, 25))), start=content.start)
    both = [request, replace(request, request_id=1, contents=(other,))]
    first, second = generate(engine, both)
    assert first.logps != second.logps


def test_a_request_continues_with_its_images_and_after_an_update(engine: Any, folder: Path) -> None:
    model = tiny_model("qwen3_vl", 1).eval()
    write_weights(engine, model, version=4)
    asked = requests(folder)[:3]
    whole = generate(engine, asked)
    engine.submit(asked)
    for _ in range(4):
        engine.step()
    begun = engine.pending()
    assert all(request.contents == one.contents for request, one in zip(begun, asked, strict=True))
    engine.clear()
    write_weights(engine, model, version=5)
    for done, one in zip(generate(engine, begun), whole, strict=True):
        assert done.tokens == one.tokens and done.logps == pytest.approx(one.logps, abs=1e-5)
