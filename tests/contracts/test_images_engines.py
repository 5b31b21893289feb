"""Engines with images: greedy responses are those of transformers' generate, after two updates."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
import vllm_kernels
from adapter_cases import merge_random, write_tensors
from engine_cases import LOGP_TOLERANCE
from packaged import engine_class, needs
from rounded_agreement import check_rounded
from tiny_images import (
    FAMILIES,
    PREPROCESSING,
    TOKEN,
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
from hybridrl.models.family import is_kept_in_fp32, read_model
from hybridrl.models.hf.directory import read_config
from hybridrl.models.hf.transformers_weights import checkpoint_tensors
from hybridrl.models.vision.images import FILE, ImageProcessor, decoded
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import Completion, Request, SamplingParams, generate
from hybridrl.rollout.hf.adapter import HfEngine
from hybridrl.rollout.vllm import arguments, start

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=8)
LONGER = replace(GREEDY, max_new_tokens=24)
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

    def config(self) -> dict[str, Any]:
        return read_config(self.folder, self.name)

    def is_rounded(self, engine: str) -> bool:
        """Whether an engine computes in bfloat16: vLLM has no other delta nets on CPU."""
        return engine == "vllm" and self.name.startswith("qwen3_5")

    def model(self, seed: int, engine: str) -> Any:
        # Heads of a size for which vLLM has kernels on CPU.
        model = tiny_model(self.name, seed, wide=True).eval()
        # transformers takes a drawn placeholder of an image for an image.
        model.lm_head.weight.data[TOKEN] = 0
        for name, parameter in model.named_parameters() if self.is_rounded(engine) else ():
            if not is_kept_in_fp32(name):
                parameter.data = parameter.data.bfloat16()
        return model


@pytest.fixture(
    scope="module",
    params=[FAMILIES[0], *(pytest.param(one, marks=pytest.mark.full) for one in FAMILIES[1:])],
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    root = tmp_path_factory.mktemp("images")
    found = Case(request.param, root)
    found.model(0, "hf").save_pretrained(root)
    save_processor(root)
    return found


def started_vllm(
    case: Case, lora: Lora | None = None, max_batch: int = 3, kv_cache_bytes: int = 8 << 20
) -> Any:
    """Starts a vLLM engine without weights."""
    vllm_kernels.register()
    hf_config = case.config()
    family = adapted(read_model(None, hf_config)[0], lora)
    settings = EngineSettings(
        hf_config=family.for_engines(hf_config),
        architectures=family.architectures,
        dtype="bfloat16" if case.is_rounded("vllm") else "float32",
        max_batch=max_batch,
        max_tokens=160,
        kv_cache_bytes=kv_cache_bytes,
        directory=case.folder,
    )
    return engine_class("vllm")(settings, family, RolloutLayout.consecutive(1, 1), rank=0)


def started_hf(case: Case, lora: Lora | None = None) -> Any:
    """Starts an `hf` engine without weights."""
    hf_config = case.config()
    family = adapted(read_model(None, hf_config)[0], lora)
    return HfEngine(hf_config, "float32", "cpu", 3, family, directory=case.folder)


def write(engine: Any, model: Any, case: Case, version: int) -> None:
    """Copies a transformers model into the engine."""
    tensors = checkpoint_tensors(model, case.config())
    write_tensors(engine, {name: one.detach() for name, one in tensors.items()}, version)


START = {"hf": started_hf, "vllm": started_vllm}
ENGINES = ["hf", pytest.param("vllm", marks=[*needs("vllm"), pytest.mark.full])]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, case: Case, process_group: None) -> Iterator[Any]:
    started = START[request.param](case)
    yield started
    started.close()


def processor_for(case: Case) -> ImageProcessor:
    _, shape = read_model(None, case.config())
    return processor_of(case.folder, shape.vision)


def requests(case: Case) -> list[Request]:
    processor, made = processor_for(case), []
    for number, places in enumerate(PROMPTS):
        generator = torch.Generator().manual_seed(number % 4)
        tokens = tuple(torch.randint(2, 180, (3 + number % 4,), generator=generator).tolist())
        files = {at: file_of(picture(*one)) for at, one in places.items()}
        tokens, contents = with_images(processor, tokens, files)
        made.append(Request(number, tokens, number, GREEDY, contents=contents))
    return made


def images_of(folder: Path, request: Request, num_tokens: int) -> dict[str, Any]:
    """Returns transformers' inputs for a request's images."""
    if not request.contents:
        return {}
    kinds = torch.zeros(1, num_tokens, dtype=torch.int64)
    for content in request.contents:
        kinds[:, content.start : content.end] = 1
    files = [decoded(content.arrays[FILE].tobytes()) for content in request.contents]
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return {**processor(files, return_tensors="pt"), "mm_token_type_ids": kinds}


def expected(oracle: Any, folder: Path, request: Request) -> tuple[list[int], list[float]]:
    """Returns transformers' greedy tokens and their log-probabilities."""
    tokens = torch.tensor(request.prompt)
    oracle.model.rope_deltas = None
    found = oracle.generate(
        input_ids=tokens[None],
        attention_mask=torch.ones_like(tokens)[None],
        do_sample=False,
        max_new_tokens=request.sampling.max_new_tokens,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **images_of(folder, request, len(tokens)),
    )
    drawn = found.sequences[0, len(tokens) :].tolist()
    logps = [
        float(logits[0].log_softmax(-1)[token])
        for logits, token in zip(found.logits, drawn, strict=True)
    ]
    return drawn, logps


def check(
    engine: Any, oracle: Any, case: Case, asked: Sequence[Request], done: Sequence[Completion]
) -> None:
    """Checks that greedy responses are those of transformers, up to an engine's rounding."""
    if case.is_rounded(engine.name):
        check_rounded(oracle, asked, done, partial(images_of, case.folder))
        return
    for request, one in zip(asked, done, strict=True):
        tokens, logps = expected(oracle, case.folder, request)
        assert list(one.tokens) == tokens, request.request_id
        assert one.logps == pytest.approx(logps, abs=LOGP_TOLERANCE)


def test_greedy_equals_transformers_after_two_updates(engine: Any, case: Case) -> None:
    asked = requests(case)
    for seed in (1, 2):
        oracle = case.model(seed, engine.name)
        write(engine, oracle, case, version=seed)
        check(engine, oracle, case, asked, generate(engine, asked))


def test_images_in_later_turns_equal_transformers(engine: Any, case: Case) -> None:
    """A conversation whose second turn brings no image, and whose third brings two."""
    processor = processor_for(case)
    brought: list[dict[int, tuple[int, int, int]]] = [
        {1: (1, 17, 25)},
        {},
        {0: (6, 25, 17), 1: (1, 17, 25)},
    ]
    for seed in (1, 2):
        oracle = case.model(seed, engine.name)
        write(engine, oracle, case, version=seed)
        tokens: tuple[int, ...] = ()
        contents: tuple[Content, ...] = ()
        asked, done = list[Request](), list[Completion]()
        for turn, images in enumerate(brought):
            files = {at: file_of(picture(*one)) for at, one in images.items()}
            shown, found = with_images(processor, (7, 8 + turn), files)
            contents += tuple(replace(one, start=len(tokens) + one.start) for one in found)
            tokens += shown
            asked.append(Request(turn, tokens, turn, LONGER, contents=contents))
            done += generate(engine, asked[-1:])
            tokens += done[-1].tokens
        check(engine, oracle, case, asked, done)


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
    asked, found = requests(case), {}
    for seed in (1, 2):
        oracle = case.model(seed, engine.name)
        write(engine, oracle, case, version=2)
        done = generate(engine, asked)
        check(engine, oracle, case, asked, done)
        found[seed] = done[0].logps
    assert found[1] != found[2]


def test_equal_tokens_with_other_images_have_other_responses(engine: Any, case: Case) -> None:
    write(engine, case.model(1, engine.name), case, version=3)
    request = requests(case)[0]
    (content,) = request.contents
    image = processor_for(case).content(file_of(picture(9, 17, 25)))
    other = replace(image, start=content.start)
    both = [request, replace(request, request_id=1, contents=(other,))]
    first, second = generate(engine, both)
    assert first.logps != second.logps


def test_a_request_continues_with_its_images_and_after_an_update(engine: Any, case: Case) -> None:
    oracle = case.model(1, engine.name)
    write(engine, oracle, case, version=4)
    asked = requests(case)[:3]
    engine.submit(asked)
    for _ in range(4):
        engine.step()
    begun = engine.pending()
    assert any(request.tokens for request in begun)
    assert all(request.contents == one.contents for request, one in zip(begun, asked, strict=True))
    engine.clear()
    write(engine, oracle, case, version=5)
    check(engine, oracle, case, asked, generate(engine, begun))


def test_requests_wait_for_the_memory_of_pixel_values(
    engine: Any, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = case.model(1, engine.name)
    write(engine, oracle, case, version=6)
    asked = requests(case)
    monkeypatch.setattr("hybridrl.rollout.common.image_pixels.MAX_PIXEL_BYTES", 1)
    engine.submit(asked)
    done, most = dict[int, Completion](), 0
    while len(done) < len(asked):
        engine.step()
        done |= {one.request_id: one for one in engine.collect()}
        if engine.name == "vllm":
            rows = engine._running.values()
            most = max(most, sum(bool(row.request.contents) for row in rows))
    assert most <= 1
    check(engine, oracle, case, asked, [done[one.request_id] for one in asked])


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes vLLM engines that start now compute at most 168 tokens per step, also parts of prompts
    as on GPUs.
    """
    monkeypatch.setattr(arguments, "CPU_PREFILL_TOKENS", 168)
    own = arguments.engine_arguments

    def with_parts(*args: Any) -> dict[str, Any]:
        return own(*args) | {"enable_chunked_prefill": True}

    monkeypatch.setattr(start, "engine_arguments", with_parts)


@pytest.mark.parametrize("name", ENGINES[1:])
def test_images_and_prompts_are_computed_once_for_all_samples(
    name: str, case: Case, tmp_path: Path, process_group: None, small_steps: None
) -> None:
    """Two prompts fill a step, except for tokens before the image of a third, whose tower pass must
    wait; and two images fill the cache that vLLM would make for its features.
    """
    case = replace(case, folder=copytree(case.folder, tmp_path / "model"))
    size = {"shortest_edge": 64, "longest_edge": 64 * 64}
    rules = json.dumps({**PREPROCESSING, "size": size})
    (case.folder / "preprocessor_config.json").write_text(rules)
    started = started_vllm(case, max_batch=32, kv_cache_bytes=32 << 20)
    asked, num_samples, num_drawn = [], 2, 5
    processor = processor_for(case)
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
            oracle = case.model(version, name)
            write(started, oracle, case, version)
            done = generate(started, asked)
            check(started, oracle, case, asked[::num_samples], done[::num_samples])
            assert images == [(1, 16, 16)] * 8
            size, shared = len(asked[0].prompt), arguments.CPU_BLOCK_SIZE * 2
            if case.is_rounded(name):  # delta nets, whose prefixes are not cached on CPU
                shared = 0
            once = size + (num_samples - 1) * (size - shared)
            assert sum(computed) == 8 * (once + num_samples * (num_drawn - 1))
    finally:
        started.close()


@pytest.mark.parametrize("name", ENGINES)
def test_adapters_of_the_decoder_leave_the_tower_alone(
    name: str, case: Case, process_group: None
) -> None:
    """The oracle is transformers' model with merged adapters."""
    if case.is_rounded(name):
        return  # vLLM has no adapters of delta nets; it receives merged weights
    lora = Lora(4, 10.0)
    started = START[name](case, lora)
    hf_config = case.config()
    family, shape = read_model(None, hf_config)
    model, asked = case.model(1, name), requests(case)
    oracle, tensors = merge_random(model, adapted(family, lora), shape, 5, hf_config)
    try:
        write_tensors(started, tensors, 1)
        check(started, oracle, case, asked, generate(started, asked))
        plain = [replace(asked[0], adapter=None)]
        check(started, case.model(1, name), case, plain, generate(started, plain))
    finally:
        started.close()
