"""Engines with images: greedy responses are those of transformers' generate, after two updates."""

from __future__ import annotations

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
from packaged import CLASSES, REFUSED_FAMILIES, REFUSED_KEYS, engine_class, needs
from rounded_agreement import check_rounded
from tiny_images import (
    FAMILIES,
    TOKEN,
    file_of,
    oracle_logits,
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

    def config(self, engine: str = "hf") -> dict[str, Any]:
        """Returns config.json, without keys of models that an engine refuses."""
        refused = REFUSED_KEYS.get(engine, ())
        content = read_config(self.folder, self.name)
        return {key: value for key, value in content.items() if key not in refused}

    def check_served(self, engine: str) -> None:
        """Skips a test with an engine that does not support the model."""
        if self.name in REFUSED_FAMILIES.get(engine, ()):
            pytest.skip(f"{engine} does not support {self.name}")

    @property
    def patch_size(self) -> int:
        size: int = read_model(None, self.config())[1].vision.patch_size
        return size

    def picture(self, seed: int, width: int, height: int) -> bytes:
        """Returns the file of a picture, whose sides are given for patches of 4 pixels."""
        width, height = (side * self.patch_size // 4 for side in (width, height))
        return file_of(picture(seed, width, height))

    def save_rules(self, folder: Path, most: int = 1024) -> None:
        """Writes the processor's file, for images of 64 to `most` pixels with patches of 4."""
        more = self.patch_size**2 / 16
        size = {"shortest_edge": int(64 * more), "longest_edge": int(most * more)}
        save_processor(folder, patch_size=self.patch_size, size=size)

    def is_rounded(self, engine: str) -> bool:
        """Whether an engine computes in bfloat16: vLLM has no other delta nets on CPU."""
        return engine == "vllm" and self.name.startswith("qwen3_5")

    def model(self, seed: int, engine: str) -> Any:
        # Heads of a size for which vLLM has kernels on CPU.
        dense = () if REFUSED_KEYS.get(engine) else (1,)
        model = tiny_model(self.name, seed, wide=True, dense_layers=dense).eval()
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
    found.save_rules(root)
    return found


def started_package(
    name: str,
    case: Case,
    lora: Lora | None = None,
    max_batch: int = 3,
    kv_cache_bytes: int = 8 << 20,
) -> Any:
    """Starts an engine of a package without weights."""
    if name == "vllm":
        vllm_kernels.register()
    hf_config = case.config(name)
    family = adapted(read_model(None, hf_config)[0], lora)
    settings = EngineSettings(
        hf_config=family.for_engines(hf_config),
        architectures=family.architectures,
        dtype="bfloat16" if case.is_rounded(name) else "float32",
        max_batch=max_batch,
        max_tokens=160,
        kv_cache_bytes=kv_cache_bytes,
        directory=case.folder,
    )
    return engine_class(name)(settings, family, RolloutLayout.consecutive(1, 1), rank=0)


def started_hf(case: Case, lora: Lora | None = None) -> Any:
    """Starts an `hf` engine without weights."""
    hf_config = case.config()
    family = adapted(read_model(None, hf_config)[0], lora)
    return HfEngine(hf_config, "float32", "cpu", 3, family, directory=case.folder)


def write(engine: Any, model: Any, case: Case, version: int) -> None:
    """Copies a transformers model into the engine."""
    tensors = checkpoint_tensors(model, case.config(engine.name))
    write_tensors(engine, {name: one.detach() for name, one in tensors.items()}, version)


START = {"hf": started_hf, **{name: partial(started_package, name) for name in CLASSES}}
PACKAGED = [pytest.param(name, marks=[*needs(name), pytest.mark.full]) for name in CLASSES]
ENGINES = ["hf", *PACKAGED]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, case: Case, process_group: None) -> Iterator[Any]:
    case.check_served(request.param)
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
        files = {at: case.picture(*one) for at, one in places.items()}
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
            files = {at: case.picture(*one) for at, one in images.items()}
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


def test_a_sleeping_engine_keeps_no_features_of_images(engine: Any, case: Case) -> None:
    """They would take memory while the policy trains, and new weights never use them."""
    if engine.name != "vllm":
        return
    write(engine, case.model(1, engine.name), case, version=1)
    generate(engine, requests(case))
    features = start.runner_of(engine._live.llm).encoder_cache
    assert features
    engine.sleep()
    assert not features


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
    oracle = case.model(1, engine.name)
    write(engine, oracle, case, version=3)
    request = requests(case)[0]
    (content,) = request.contents
    image = processor_for(case).content(case.picture(9, 17, 25))
    other = replace(image, start=content.start)
    both = [request, replace(request, request_id=1, contents=(other,))]
    first, second = generate(engine, both)
    assert first.logps != second.logps
    if case.is_rounded(engine.name):
        return  # such models' prompts are not cached on CPU
    for request in both:
        check(engine, oracle, case, [request], generate(engine, [request]))


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
        if engine.name != "hf":
            rows = (getattr(one, "row", one) for one in engine._running.values())
            most = max(most, sum(bool(row.request.contents) for row in rows))
    assert most <= 1
    check(engine, oracle, case, asked, [done[one.request_id] for one in asked])


def test_drawn_placeholders_are_text(engine: Any, case: Case) -> None:
    """Also if the request continues after an update, and its response becomes part of a prompt."""
    if case.is_rounded(engine.name):
        return  # the oracle here is exact
    oracle = case.model(1, engine.name)
    write(engine, oracle, case, version=7)
    one = requests(case)[0]
    (content,) = one.contents
    begun = replace(one, tokens=(TOKEN, 9), logps=(-1.0, -1.0), version=7)
    (done,) = generate(engine, [begun])
    image = decoded(content.arrays[FILE].tobytes())
    processor = Qwen2VLImageProcessorPil.from_pretrained(case.folder)
    tokens = torch.tensor([*one.prompt, *done.tokens])
    with torch.no_grad():
        logits = oracle_logits(oracle, processor, tokens, [(content.start, content.end, image)])
    logps = logits[len(one.prompt) - 1 : -1].log_softmax(-1)
    drawn = torch.tensor(done.tokens)
    assert done.tokens[:2] == (TOKEN, 9) and len(done.tokens) == GREEDY.max_new_tokens
    assert torch.equal(logps.argmax(-1)[2:], drawn[2:])
    expected_logps = logps.gather(1, drawn[:, None])[2:, 0].tolist()
    assert done.logps[2:] == pytest.approx(expected_logps, abs=LOGP_TOLERANCE)


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


def large_pictures(case: Case, num_prompts: int, num_samples: int) -> list[Request]:
    """Returns samples of prompts with an image of 64 tokens, whose tokens are all equal."""
    processor, sampling = processor_for(case), replace(GREEDY, max_new_tokens=5)
    made = []
    for prompt in range(num_prompts):
        files = {1: case.picture(20 + prompt, 64, 64)}
        tokens, contents = with_images(processor, tuple(range(2, 8)), files)
        numbers = range(prompt * num_samples, (prompt + 1) * num_samples)
        made += [Request(one, tokens, one, sampling, contents=contents) for one in numbers]
    return made


@pytest.fixture
def large_case(case: Case, tmp_path: Path) -> Case:
    """Returns the case with a processor that does not shrink images of 64 tokens."""
    large = replace(case, folder=copytree(case.folder, tmp_path / "model"))
    large.save_rules(large.folder, most=64 * 64)
    return large


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param("vllm", marks=needs("vllm"))])
def test_images_and_prompts_are_computed_once_for_all_samples(
    name: str, large_case: Case, process_group: None, small_steps: None
) -> None:
    """Two prompts fill a step, except for tokens before the image of a third, whose tower pass must
    wait; and two images fill the cache that vLLM would make for its features.
    """
    case, num_samples = large_case, 2
    started = started_package(name, case, max_batch=32, kv_cache_bytes=32 << 20)
    asked = large_pictures(case, 8, num_samples)
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
            num_drawn = asked[0].sampling.max_new_tokens
            assert sum(computed) == 8 * (once + num_samples * (num_drawn - 1))
    finally:
        started.close()


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param("sglang", marks=needs("sglang"))])
@pytest.mark.parametrize("num_samples", [2, 3])
def test_sglang_computes_images_once_for_all_samples(
    name: str, num_samples: int, large_case: Case, process_group: None
) -> None:
    """Two samples of each prompt are in one pass. Of three, the first one starts alone, because
    the others would compute more than 1,024 tokens again.
    """
    from sglang.srt.layers.attention.vision import VisionSdpaAttention

    case, num_prompts = large_case, 8
    case.check_served(name)
    masks = VisionSdpaAttention._generate_mask_cache
    masks.cache_clear()
    started = started_package(name, case, max_batch=32, kv_cache_bytes=32 << 20)
    asked = large_pictures(case, num_prompts, num_samples)
    model, scheduler = started._live.model, started._live.scheduler
    features_of, run_batch = model.get_image_feature, scheduler.run_batch
    images: list[list[int]] = []
    computed: list[int] = []

    def counted_images(items: Any) -> Any:
        images.extend(grid for item in items for grid in item.image_grid_thw.tolist())
        return features_of(items)

    def counted_tokens(batch: Any, *args: Any, **keywords: Any) -> Any:
        if not batch.forward_mode.is_decode():
            computed.append(batch.extend_num_tokens)
        return run_batch(batch, *args, **keywords)

    model.get_image_feature, scheduler.run_batch = counted_images, counted_tokens
    try:
        for version in (1, 2):
            images.clear()
            computed.clear()
            oracle = case.model(version, name)
            write(started, oracle, case, version)
            done = generate(started, asked)
            check(started, oracle, case, asked[::num_samples], done[::num_samples])
            assert images == [[1, 16, 16]] * num_prompts
            size = len(asked[0].prompt)
            # A sample that finds its whole prompt computes the last token.
            others = size if num_samples == 2 else 1
            assert sum(computed) == num_prompts * (size + (num_samples - 1) * others)
            assert masks.cache_info().currsize == 0  # of all pairs of a pass's patches
    finally:
        started.close()


@pytest.mark.full
@pytest.mark.parametrize("name", [pytest.param("sglang", marks=needs("sglang"))])
def test_sglang_continues_with_images_when_its_cache_is_full(
    name: str, large_case: Case, process_group: None
) -> None:
    """A request that SGLang retracts computes its image, and the tokens that it drew, again."""
    case = large_case
    case.check_served(name)
    shape = read_model(None, case.config(name))[1]
    room = 540 * shape.token_bytes(1, 4)  # four requests, but only the first tokens of each
    started = started_package(name, case, max_batch=4, kv_cache_bytes=room)
    longer = replace(GREEDY, max_new_tokens=80)
    asked = [replace(one, sampling=longer) for one in large_pictures(case, 4, 1)]
    retracted = list[str]()
    updating = started._scheduler.update_running_batch

    def counted(batch: Any) -> Any:
        found = updating(batch)
        retracted.extend(one.rid for one in started._scheduler.waiting_queue if one.is_retracted)
        return found

    started._scheduler.update_running_batch = counted
    try:
        oracle = case.model(1, name)
        write(started, oracle, case, version=1)
        done = generate(started, asked)
        assert retracted
        check(started, oracle, case, asked, done)
    finally:
        started.close()


@pytest.mark.parametrize("name", ENGINES)
def test_adapters_of_the_decoder_leave_the_tower_alone(
    name: str, case: Case, process_group: None
) -> None:
    """The oracle is transformers' model with merged adapters."""
    case.check_served(name)
    if case.is_rounded(name):
        return  # vLLM has no adapters of delta nets; it receives merged weights
    lora = Lora(4, 10.0)
    started = START[name](case, lora)
    hf_config = case.config(name)
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
