"""Engines with images: greedy responses are those of transformers' generate, after two updates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import vllm_kernels
from adapter_cases import merge_random, write_tensors
from engine_cases import LOGP_TOLERANCE
from packaged import engine_class, needs
from tiny_images import (
    FAMILIES,
    PREPROCESSING,
    file_of,
    picture,
    processor_of,
    save_processor,
    with_images,
)
from tiny_models import tiny_model
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hybridrl.contracts.prompts import Content
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.rows import adapted
from hybridrl.models.family import read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.transformers_weights import checkpoint_tensors
from hybridrl.models.vision.images import FILE, decoded
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.rollout.hf.adapter import HfEngine
from hybridrl.rollout.vllm import arguments, start

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
# Images of each prompt: the token before which each stands, and its seed, width and height.
PROMPTS: list[dict[int, tuple[int, int, int]]] = [
    {1: (1, 17, 25)},
    {},
    {0: (2, 40, 24), 2: (1, 17, 25)},
    {2: (3, 8, 8)},
    {1: (1, 17, 25)},
]


@dataclass(frozen=True)
class Case:
    """A tiny model, and the directory with its configuration and its processor's files."""

    name: str
    folder: Path

    def model(self, seed: int) -> Any:
        # Heads of a size for which vLLM has kernels on CPU.
        return tiny_model(self.name, seed, wide=True).eval()


@pytest.fixture(
    scope="module",
    params=[FAMILIES[0], *(pytest.param(one, marks=pytest.mark.full) for one in FAMILIES[1:])],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("images")
    found = Case(request.param, root)
    found.model(0).save_pretrained(root)
    save_processor(root)
    return found


def started_vllm(
    folder: Path, lora: Lora | None = None, max_batch: int = 3, kv_cache_bytes: int = 8 << 20
) -> Any:
    """Starts a vLLM engine without weights."""
    vllm_kernels.register()
    hf_config = read_config(folder)
    family = adapted(read_model(None, hf_config)[0], lora)
    settings = EngineSettings(
        hf_config=family.for_engines(hf_config),
        architectures=family.architectures,
        dtype="float32",
        max_batch=max_batch,
        max_tokens=120,
        kv_cache_bytes=kv_cache_bytes,
        directory=folder,
    )
    return engine_class("vllm")(settings, family, RolloutLayout.consecutive(1, 1), rank=0)


def started_hf(folder: Path, lora: Lora | None = None) -> Any:
    """Starts an `hf` engine without weights."""
    hf_config = read_config(folder)
    family = adapted(read_model(None, hf_config)[0], lora)
    return HfEngine(hf_config, "float32", "cpu", 3, family, directory=folder)


def write(engine: Any, model: Any, case: Case, version: int) -> None:
    """Copies a transformers model into the engine."""
    tensors = checkpoint_tensors(model, read_config(case.folder))
    write_tensors(engine, {name: one.detach() for name, one in tensors.items()}, version)


START = {"hf": started_hf, "vllm": started_vllm}
ENGINES = ["hf", pytest.param("vllm", marks=[*needs("vllm"), pytest.mark.full])]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, case: Case, process_group: None) -> Iterator[Any]:
    started = START[request.param](case.folder)
    yield started
    started.close()


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


def expected(oracle: Any, folder: Path, request: Request) -> tuple[list[int], list[float]]:
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
    oracle.model.rope_deltas = None
    found = oracle.generate(
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


def test_greedy_equals_transformers_after_two_updates(engine: Any, case: Case) -> None:
    asked = requests(case.folder)
    for seed in (1, 2):
        oracle = case.model(seed)
        write(engine, oracle, case, version=seed)
        for request, done in zip(asked, generate(engine, asked), strict=True):
            tokens, logps = expected(oracle, case.folder, request)
            assert list(done.tokens) == tokens, request.request_id
            assert done.logps == pytest.approx(logps, abs=LOGP_TOLERANCE)


def test_images_in_later_turns_equal_transformers(engine: Any, case: Case) -> None:
    """A conversation whose second turn brings no image, and whose third brings two."""
    _, shape = read_model(None, read_config(case.folder))
    processor = processor_of(case.folder, shape.vision)
    brought: list[dict[int, tuple[int, int, int]]] = [
        {1: (1, 17, 25)},
        {},
        {0: (6, 25, 17), 1: (1, 17, 25)},
    ]
    for seed in (1, 2):
        oracle = case.model(seed)
        write(engine, oracle, case, version=seed)
        tokens: tuple[int, ...] = ()
        contents: tuple[Content, ...] = ()
        for turn, images in enumerate(brought):
            files = {at: file_of(picture(*one)) for at, one in images.items()}
            shown, found = with_images(processor, (7, 8 + turn), files)
            contents += tuple(replace(one, start=len(tokens) + one.start) for one in found)
            tokens += shown
            request = Request(turn, tokens, turn, GREEDY, contents=contents)
            (done,) = generate(engine, [request])
            drawn, logps = expected(oracle, case.folder, request)
            assert list(done.tokens) == drawn, turn
            assert done.logps == pytest.approx(logps, abs=LOGP_TOLERANCE)
            tokens += done.tokens


def test_a_stand_in_for_the_processor_has_what_vllm_asks_for(engine: Any) -> None:
    """vLLM 0.26 clears the processor's cache when an engine starts; newer versions keep it."""
    if engine.name != "vllm":
        return
    renderer = engine._live.llm.renderer
    assert renderer.get_mm_processor().cache is None
    renderer.clear_mm_cache()
    assert engine._live.llm.reset_mm_cache() is None


def test_images_are_read_again_after_an_update_with_an_equal_version(
    engine: Any, case: Case
) -> None:
    """A checkpoint that is loaded again has weights of an earlier version."""
    (request,) = requests(case.folder)[:1]
    found = {}
    for seed in (1, 2):
        write(engine, case.model(seed), case, version=2)
        (done,) = generate(engine, [request])
        tokens, logps = expected(case.model(seed), case.folder, request)
        assert list(done.tokens) == tokens
        assert done.logps == pytest.approx(logps, abs=LOGP_TOLERANCE)
        found[seed] = done.logps
    assert found[1] != found[2]


def test_equal_tokens_with_other_images_have_other_responses(engine: Any, case: Case) -> None:
    write(engine, case.model(1), case, version=3)
    request = requests(case.folder)[0]
    _, shape = read_model(None, read_config(case.folder))
    processor = processor_of(case.folder, shape.vision)
    (content,) = request.contents
    other = replace(processor.content(file_of(picture(9, 17, 25))), start=content.start)
    both = [request, replace(request, request_id=1, contents=(other,))]
    first, second = generate(engine, both)
    assert first.logps != second.logps


def test_a_request_continues_with_its_images_and_after_an_update(engine: Any, case: Case) -> None:
    write(engine, case.model(1), case, version=4)
    asked = requests(case.folder)[:3]
    whole = generate(engine, asked)
    engine.submit(asked)
    for _ in range(4):
        engine.step()
    begun = engine.pending()
    assert all(request.contents == one.contents for request, one in zip(begun, asked, strict=True))
    engine.clear()
    write(engine, case.model(1), case, version=5)
    for done, one in zip(generate(engine, begun), whole, strict=True):
        assert done.tokens == one.tokens
        assert done.logps == pytest.approx(one.logps, abs=LOGP_TOLERANCE)


def test_requests_wait_for_the_memory_of_pixel_values(
    engine: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(engine, case.model(1), case, version=6)
    asked = requests(case.folder)
    expected = generate(engine, asked)
    monkeypatch.setattr("hybridrl.rollout.vllm.adapter.MAX_PIXEL_BYTES", 1)
    engine.submit(asked)
    done, most = {}, 0
    while len(done) < len(asked):
        engine.step()
        done |= {one.request_id: one for one in engine.collect()}
        if engine.name == "vllm":
            rows = engine._running.values()
            most = max(most, sum(bool(row.request.contents) for row in rows))
    assert most <= 1
    assert [done[one.request_id].tokens for one in asked] == [one.tokens for one in expected]


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes vLLM engines that start now compute at most 160 tokens per step, also parts of prompts
    as on GPUs.
    """
    monkeypatch.setattr(arguments, "CPU_PREFILL_TOKENS", 160)
    own = arguments.engine_arguments

    def with_parts(*args: Any) -> dict[str, Any]:
        return own(*args) | {"enable_chunked_prefill": True}

    monkeypatch.setattr(start, "engine_arguments", with_parts)


@pytest.mark.parametrize("name", ENGINES[1:])
def test_images_and_prompts_are_computed_once_for_all_samples(
    name: str, case: Case, tmp_path: Path, process_group: None, small_steps: None
) -> None:
    """Two prompts fill a step, and two images the cache that vLLM would make for its features."""
    case = replace(case, folder=copytree(case.folder, tmp_path / "model"))
    size = {"shortest_edge": 64, "longest_edge": 64 * 64}
    rules = json.dumps({**PREPROCESSING, "size": size})
    (case.folder / "preprocessor_config.json").write_text(rules)
    started = started_vllm(case.folder, max_batch=32, kv_cache_bytes=32 << 20)
    asked, num_samples, num_drawn = [], 4, 5
    _, shape = read_model(None, read_config(case.folder))
    processor = processor_of(case.folder, shape.vision)
    for prompt in range(8):
        files = {1: file_of(picture(20 + prompt, 64, 64))}
        tokens, contents = with_images(processor, tuple(range(2, 8)), files)
        for sample in range(num_samples):
            number = prompt * num_samples + sample
            sampling = replace(GREEDY, max_new_tokens=num_drawn)
            asked.append(Request(number, tokens, number, sampling, contents=contents))
    model = start.runner_of(started._live.llm).model
    scheduler = started._live.llm.engine_core.engine_core.scheduler
    embed, schedule = model.embed_multimodal, scheduler.schedule
    images: list[tuple[int, ...]] = []
    computed: list[int] = []

    def counted_images(**inputs: Any) -> Any:
        images.extend(map(tuple, inputs["image_grid_thw"].tolist()))
        return embed(**inputs)

    def counted_tokens(*args: Any, **keywords: Any) -> Any:
        scheduled = schedule(*args, **keywords)
        computed.append(scheduled.total_num_scheduled_tokens)
        return scheduled

    model.embed_multimodal, scheduler.schedule = counted_images, counted_tokens
    try:
        for version in (1, 2):
            images.clear()
            computed.clear()
            write(started, case.model(version), case, version)
            for done, request in zip(generate(started, asked), asked, strict=True):
                if request.request_id % num_samples:
                    continue
                tokens, logps = expected(case.model(version), case.folder, request)
                assert list(done.tokens) == tokens[:num_drawn]
                assert done.logps == pytest.approx(logps[:num_drawn], abs=LOGP_TOLERANCE)
            assert images == [(1, 16, 16)] * 8
            size, shared = len(asked[0].prompt), arguments.CPU_BLOCK_SIZE * 2
            once = size + (num_samples - 1) * (size - shared)
            assert sum(computed) == 8 * (once + num_samples * (num_drawn - 1))
    finally:
        started.close()


@pytest.mark.parametrize("name", ENGINES)
def test_adapters_of_the_decoder_leave_the_tower_alone(
    name: str, case: Case, process_group: None
) -> None:
    """The oracle is transformers' model with merged adapters."""
    lora = Lora(4, 10.0)
    started = START[name](case.folder, lora)
    family, shape = read_model(None, read_config(case.folder))
    hf_config = read_config(case.folder)
    oracle, tensors = merge_random(case.model(1), adapted(family, lora), shape, 5, hf_config)
    plain = requests(case.folder)[0]
    try:
        write_tensors(started, tensors, 1)
        asked = requests(case.folder)
        for request, done in zip(asked, generate(started, asked), strict=True):
            tokens, logps = expected(oracle, case.folder, request)
            assert list(done.tokens) == tokens, request.request_id
            assert done.logps == pytest.approx(logps, abs=LOGP_TOLERANCE)
        (done,) = generate(started, [replace(plain, adapter=None)])
        tokens, logps = expected(case.model(1), case.folder, plain)
        assert list(done.tokens) == tokens
        assert done.logps == pytest.approx(logps, abs=LOGP_TOLERANCE)
    finally:
        started.close()
