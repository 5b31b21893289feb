"""Ends by text, least lengths and penalties, of every engine whose traits say that it has them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from engine_cases import (
    LOGP_TOLERANCE,
    STOP,
    Letters,
    close_engines,
    make_engine,
    make_reference,
    make_requests,
)
from packaged import CLASSES, needs

from hybridrl.config import engines as registry
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.platform import Platform
from hybridrl.rollout.engine import Completion, Request, SamplingParams, generate
from hybridrl.rollout.stops import TokenTexts

PENALIZING = ["qwen3"] + [
    pytest.param(f"{name}-qwen3", marks=needs(name))
    for name in CLASSES
    if registry.ENGINES[name].penalizes
]
ENDING = ["qwen3"] + [
    pytest.param(f"{name}-qwen3", marks=needs(name))
    for name in CLASSES
    if registry.ENGINES[name].ends_by_text
]
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=16, stop_token_ids=(STOP,))


@pytest.fixture(autouse=True, scope="module")
def process_group() -> Iterator[None]:
    """The world of one rank in which engines of several ranks start."""
    start_process_group(Platform.detect(), 60)
    yield
    close_engines()
    stop_process_group()


@pytest.mark.parametrize("name", PENALIZING)
def test_engine_greedy_with_penalties_equals_transformers_generate(name: str) -> None:
    engine, model = make_engine(name), make_reference(name)
    seen = set()
    for options in ({"repetition_penalty": 1.4}, {"min_new_tokens": 9}):
        sampling = replace(GREEDY, **options)  # type: ignore[arg-type]
        requests = make_requests(8, sampling)
        for request, done in zip(requests, generate(engine, requests), strict=True):
            ids = torch.tensor([request.prompt])
            expected = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=16,
                **options,
            )
            assert list(done.tokens) == expected[0, len(request.prompt) :].tolist()
            seen.add(done.tokens)
    plain = {done.tokens for done in generate(engine, make_requests(8, GREEDY))}
    assert not seen & plain or len(seen) > 8, "the options have changed something"


def expected_logps(model: Any, request: Request, done: Completion) -> torch.Tensor:
    """By the formulas, token after token, with transformers' logits."""
    sampling, ids = request.sampling, [*request.prompt, *done.tokens]
    with torch.no_grad():
        logits_LV = model(torch.tensor([ids])).logits[0].float()
    found = []
    for place, token in enumerate(done.tokens):
        end = len(request.prompt) + place
        logits = logits_LV[end - 1].tolist()
        for one in range(len(logits)):
            if one in sampling.stop_token_ids and place < sampling.min_new_tokens:
                logits[one] = float("-inf")
            if one in ids[:end]:
                penalty = sampling.repetition_penalty
                logits[one] = logits[one] / penalty if logits[one] > 0 else logits[one] * penalty
            if one in ids[len(request.prompt) : end]:
                logits[one] -= sampling.presence_penalty
        scaled = torch.tensor(logits) / sampling.temperature
        found.append(scaled.log_softmax(-1)[token])
    return torch.stack(found)


@pytest.mark.parametrize("name", PENALIZING)
def test_engine_logps_are_those_of_the_penalized_distribution(name: str) -> None:
    engine, model = make_engine(name), make_reference(name)
    kinds = [
        SamplingParams(0.9, max_new_tokens=14, repetition_penalty=1.5, stop_token_ids=(STOP,)),
        SamplingParams(1.2, max_new_tokens=14, presence_penalty=1.1, stop_token_ids=(STOP,)),
        SamplingParams(1.0, max_new_tokens=14, min_new_tokens=6, stop_token_ids=(STOP,)),
        SamplingParams(1.0, max_new_tokens=14, stop_token_ids=(STOP,)),
    ]
    base = make_requests(24, GREEDY)
    requests = [replace(one, sampling=kinds[i % 4]) for i, one in enumerate(base)]
    least = []
    for request, done in zip(requests, generate(engine, requests), strict=True):
        expected = expected_logps(model, request, done)
        torch.testing.assert_close(torch.tensor(done.logps), expected, rtol=0, atol=LOGP_TOLERANCE)
        least += [len(done.tokens)] if request.sampling.min_new_tokens else []
    assert min(least) > 6, "the end token comes after six others at the earliest"


@pytest.mark.parametrize("name", ENDING)
def test_engine_ends_with_the_token_that_completes_a_stop_string(name: str) -> None:
    engine = make_engine(name)
    sampling = SamplingParams(max_new_tokens=24, stop_token_ids=(STOP,))
    whole = generate(engine, make_requests(12, sampling))
    texts = [Letters().decode(done.tokens, skip_special_tokens=False) for done in whole]
    # Of the first response its third and fourth letter, and letters of none.
    strings = (texts[0][2:4], "zz")
    stopped = replace(sampling, stop_strings=strings)
    with pytest.raises(ValueError, match="has stop strings"):
        engine.submit(make_requests(1, stopped))
    engine.token_texts = TokenTexts(Letters())
    ends = generate(engine, make_requests(12, stopped))
    num_cut = 0
    for text, done, plain in zip(texts, ends, whole, strict=True):
        place = text.find(strings[0])
        expected = plain.tokens if place < 0 else plain.tokens[: place + 2]
        assert done.tokens == expected
        torch.testing.assert_close(
            torch.tensor(done.logps), torch.tensor(plain.logps[: len(expected)]), rtol=0, atol=1e-5
        )
        assert done.finish_reason == ("stop" if place >= 0 else plain.finish_reason)
        num_cut += len(expected) < len(plain.tokens)
    assert num_cut >= 1
    assert not engine.has_unfinished and not engine.pending()


@pytest.mark.parametrize("name", ENDING)
def test_engine_goes_on_with_a_saved_request_to_its_stop_string(name: str) -> None:
    engine = make_engine(name)
    engine.token_texts = TokenTexts(Letters())
    sampling = SamplingParams(max_new_tokens=24, stop_token_ids=(STOP,))
    whole = generate(engine, make_requests(6, sampling))
    longest = max(whole, key=lambda done: len(done.tokens))
    text = Letters().decode(longest.tokens, skip_special_tokens=False)
    # Engines may draw two tokens in their first step.
    string = next(
        pair for pair in (text[at : at + 2] for at in range(2, 20)) if pair not in text[:3]
    )
    place = text.find(string)
    (request,) = [r for r in make_requests(6, sampling) if r.request_id == longest.request_id]
    request = replace(request, sampling=replace(sampling, stop_strings=(string,)))
    engine.submit([request])
    while len(held := engine.pending()) and len(held[0].tokens) <= place:
        engine.step()
    (saved,) = engine.pending()
    engine.clear()
    again = Request.from_dict(json.loads(json.dumps(asdict(saved))))
    assert again == saved and 0 < len(saved.tokens) <= place + 1
    (done,) = generate(engine, [again])
    assert done.tokens == longest.tokens[: place + 2] and done.finish_reason == "stop"
