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
    PENALIZED,
    STOP,
    Letters,
    close,
    close_engines,
    make_engine,
    make_reference,
    make_requests,
    penalized_logps,
    write_weights,
)
from packaged import CLASSES, LOSE_PRESENCE, needs

from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.platform import Platform
from hybridrl.rollout import registry
from hybridrl.rollout.engine import Request, SamplingParams, TokenTexts, generate

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


@pytest.mark.parametrize("name", PENALIZING)
def test_engine_logps_are_those_of_the_penalized_distribution(name: str) -> None:
    engine, model = make_engine(name), make_reference(name)
    requests = make_requests(25, PENALIZED)
    least = []
    for request, done in zip(requests, generate(engine, requests), strict=True):
        expected = penalized_logps(model, request, done)
        torch.testing.assert_close(torch.tensor(done.logps), expected, rtol=0, atol=LOGP_TOLERANCE)
        shortest = request.sampling.min_new_tokens
        least += [len(done.tokens) - shortest] if shortest else []
    assert min(least) > 0, "end tokens come after so many others at the earliest"


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize("name", PENALIZING)
def test_engine_goes_on_with_penalties_of_what_was_said_before(name: str, is_saved: bool) -> None:
    """In another engine, and in the same one after an update, while new requests join."""
    engine, requests = make_engine(name), make_requests(15, PENALIZED)
    resumes = name.partition("-")[0] not in LOSE_PRESENCE
    if not resumes:
        losing = [one for one in requests if one.sampling.presence_penalty]
        requests = [one for one in requests if not one.sampling.presence_penalty]
    expected = {done.request_id: done for done in generate(engine, requests)}
    engine.submit(requests[:6])
    for _ in range(5):
        engine.step()
    done = {one.request_id: one for one in engine.collect()}
    begun = engine.pending()
    assert any(one.tokens for one in begun)
    if is_saved:
        engine.clear()
        begun = [Request.from_dict(json.loads(json.dumps(asdict(one)))) for one in begun]
        engine = make_engine(name, max_batch=5)
        engine.submit(begun)
    else:
        write_weights(engine, make_reference(name), 1)
    engine.submit(requests[6:])
    while engine.has_unfinished:
        engine.step()
    done |= {one.request_id: one for one in engine.collect()}
    assert done.keys() == expected.keys()
    assert all(close(done[number], one) for number, one in expected.items())
    if not resumes:
        refuses_presence(engine, losing[0], is_saved, name)


def refuses_presence(engine: Any, request: Request, is_saved: bool, name: str) -> None:
    engine.submit([request])
    engine.step()
    (begun,) = engine.pending()
    assert begun.tokens
    with pytest.raises(ValueError, match="continues with presence_penalty"):
        if is_saved:
            engine.clear()
            engine.submit([begun])
        else:
            write_weights(engine, make_reference(name), 2)
            engine.step()
    engine.clear()


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
