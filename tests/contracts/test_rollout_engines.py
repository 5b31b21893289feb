"""The contract of every rollout engine: `RolloutEngine` and `WeightTarget`.

The engines are those of engine_cases.py.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import (
    ENGINES,
    FUSED,
    HF_MODELS,
    LOGP_TOLERANCE,
    MIXED,
    MODELS,
    PACKAGED_MODELS,
    STOP,
    TINY,
    VOCAB,
    close,
    close_engines,
    expected_logps,
    give_back,
    lend_engine,
    make_engine,
    make_requests,
    reference_of,
    write_weights,
)
from packaged import CLASSES, needs
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.errors import ModelError, UserError
from hybridrl.models.families.by_length import at_length
from hybridrl.models.weights import check_layout
from hybridrl.rollout import registry
from hybridrl.rollout.build import ComputingEngine
from hybridrl.rollout.common.sampling import uniforms
from hybridrl.rollout.engine import (
    Completion,
    Request,
    SamplingParams,
    finish_reason,
    generate,
    request_seed,
)
from hybridrl.rollout.hf.adapter import HfEngine
from hybridrl.rollout.scripted import ScriptedEngine

# For what an engine does alike whatever its model is.
ONE_MODEL_EACH = ["scripted", "qwen3", *FUSED[:: len(HF_MODELS)]]


@pytest.fixture(autouse=True, scope="module")
def closed_at_the_end(process_group: None) -> Iterator[None]:
    yield
    close_engines()


@pytest.fixture(autouse=True)
def given_back() -> Iterator[None]:
    yield
    give_back()


@pytest.mark.parametrize("name", MODELS)
def test_engine_greedy_equals_transformers_generate(name: str) -> None:
    engine, model = lend_engine(name), reference_of(name)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=16, stop_token_ids=(STOP,))
    requests = make_requests(10, sampling)
    for request, completion in zip(requests, generate(engine, requests), strict=True):
        ids = torch.tensor([request.prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16
        )
        assert list(completion.tokens) == expected[0, len(request.prompt) :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_engine_logps_are_those_of_the_distribution_sampled_from(name: str) -> None:
    engine, model = lend_engine(name), reference_of(name)
    requests = make_requests(15, MIXED)
    for request, completion in zip(requests, generate(engine, requests), strict=True):
        expected = expected_logps(model, request, completion)
        torch.testing.assert_close(
            torch.tensor(completion.logps), expected, rtol=0, atol=LOGP_TOLERANCE
        )


@pytest.mark.parametrize("name", ENGINES)
def test_engine_response_does_not_depend_on_the_batch(name: str) -> None:
    requests = make_requests(11, MIXED)
    together = generate(lend_engine(name, max_batch=64), requests)
    crowded = generate(lend_engine(name, max_batch=3), requests[::-1])[::-1]
    engine = lend_engine(name)
    alone = [generate(engine, [request])[0] for request in requests]
    assert {len(c.tokens) for c in together} != {1}
    for one, two, three in zip(together, crowded, alone, strict=True):
        assert close(one, two)
        assert close(one, three)


@pytest.mark.parametrize(
    ("registered", "name"),
    [
        ("hf", "qwen3"),
        ("scripted", "scripted"),
        *(pytest.param(name, f"{name}-qwen3", marks=needs(name)) for name in CLASSES),
    ],
)
def test_engine_has_the_traits_of_the_registry(registered: str, name: str) -> None:
    traits, engine = registry.ENGINES[registered], lend_engine(name)
    assert traits.builder.partition(":")[0] == type(engine).__module__
    assert isinstance(engine, ComputingEngine) == traits.computes
    is_fused = any(region.local != region.hf for region in engine.layout().regions)
    assert is_fused == traits.has_fused_parameters
    assert hasattr(engine, "shared") == traits.shares_memory


@pytest.mark.parametrize("name", ONE_MODEL_EACH)
def test_engine_seed_decides_the_sample(name: str) -> None:
    sampling = SamplingParams(max_new_tokens=12)
    same = [Request(i, (5, 6, 7), 42, sampling) for i in range(3)]
    other = [Request(10 + i, (5, 6, 7), i, sampling) for i in range(20)]
    done = generate(lend_engine(name, max_batch=64), same + other)
    assert len({c.tokens for c in done[:3]}) == 1
    assert len({c.tokens for c in done[3:]}) == 20


@pytest.mark.parametrize("name", ONE_MODEL_EACH[1:])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0, max_new_tokens=1),
        SamplingParams(temperature=1.7, top_k=6, top_p=0.9, max_new_tokens=1),
    ],
)
def test_engine_sampling_frequencies_match_probabilities(
    name: str, sampling: SamplingParams
) -> None:
    engine, model = lend_engine(name, max_batch=4096), reference_of(name)
    requests = [Request(i, (4, 9), request_seed(1, 2, i), sampling) for i in range(4000)]
    done = generate(engine, requests)
    counts = np.bincount([c.tokens[0] for c in done], minlength=VOCAB)
    prob = np.zeros(VOCAB)
    for token in np.flatnonzero(counts):
        completion = Completion(0, (int(token),), (0.0,), "length", 0)
        prob[token] = expected_logps(model, requests[0], completion).exp().item()
    assert prob.sum() > 0.99
    large = prob * len(done) >= 5
    chi_square = (((counts - prob * len(done)) ** 2)[large] / (prob[large] * len(done))).sum()
    # Chi-square with d degrees has mean d and variance 2 d: five sigma, on a fixed seed.
    degrees = int(large.sum()) - 1
    assert degrees >= 3
    assert chi_square < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("name", ONE_MODEL_EACH)
def test_engine_stops_at_a_stop_token_or_at_the_limit(name: str) -> None:
    sampling = SamplingParams(max_new_tokens=6, stop_token_ids=(STOP, 2, 3))
    done = generate(lend_engine(name, max_batch=64), make_requests(64, sampling))
    assert {c.finish_reason for c in done} == {"stop", "length"}
    for completion in done:
        assert not set(completion.tokens[:-1]) & {STOP, 2, 3}
        assert completion.finish_reason == finish_reason(completion.tokens, sampling)
        assert completion.finish_reason == "stop" or len(completion.tokens) == 6
        assert len(completion.logps) == len(completion.tokens)


@pytest.mark.parametrize("name", ENGINES)
def test_engine_takes_requests_while_others_run(name: str) -> None:
    requests = make_requests(15, MIXED)
    expected = {c.request_id: c for c in generate(lend_engine(name), requests)}
    engine = lend_engine(name, max_batch=4)
    found: list[Completion] = []
    for start in range(0, 15, 5):
        engine.submit(requests[start : start + 5])
        for _ in range(3):
            engine.step()
        found += engine.collect()
        unfinished = {r.request_id for r in engine.pending()}
        finished = {c.request_id for c in found}
        assert unfinished | finished == {r.request_id for r in requests[: start + 5]}
        assert not unfinished & finished
    assert engine.has_unfinished
    while engine.has_unfinished:
        engine.step()
    found += engine.collect()
    assert engine.collect() == []
    assert engine.pending() == []
    assert len(found) == 15
    assert all(close(c, expected[c.request_id]) for c in found)


@pytest.mark.parametrize("name", ENGINES)
def test_engine_that_was_cleared_takes_the_same_requests_anew(name: str) -> None:
    requests = make_requests(9, MIXED)
    expected = {c.request_id: c for c in generate(lend_engine(name), requests)}
    engine = lend_engine(name, max_batch=4)
    engine.submit(requests)
    for _ in range(4):
        engine.step()
    engine.clear()
    assert not engine.has_unfinished and engine.pending() == [] and engine.collect() == []
    found = generate(engine, requests)
    assert len(found) == 9 and all(close(c, expected[c.request_id]) for c in found)


@pytest.mark.parametrize("name", ENGINES)
def test_engine_pending_requests_continue_in_another_engine(name: str) -> None:
    requests = make_requests(9, MIXED)
    expected = {c.request_id: c for c in generate(lend_engine(name), requests)}
    first = lend_engine(name, max_batch=4, version=7)
    first.submit(requests)
    for _ in range(4):
        first.step()
    saved = json.loads(json.dumps([dataclasses.asdict(r) for r in first.pending()]))
    pending = [Request.from_dict(fields) for fields in saved]
    assert pending == first.pending()
    assert {bool(r.tokens) for r in pending} == {True, False}
    second = lend_engine(name, max_batch=3, version=8)
    continued = generate(second, pending)
    done = {c.request_id: c for c in [*first.collect(), *continued]}
    assert done.keys() == expected.keys()
    assert all(close(done[i], expected[i]) for i in expected)
    for request, completion in zip(pending, continued, strict=True):
        assert completion.version == (7 if request.tokens else 8)
        num, begun = len(completion.tokens), len(request.tokens)
        assert completion.runs == (((7, begun), (8, num - begun)) if begun else ((8, num),))
        assert bool(completion.versions) == bool(begun)


@pytest.mark.parametrize("name", ONE_MODEL_EACH)
def test_engine_leaves_the_global_generators_alone(name: str) -> None:
    torch.manual_seed(5)
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    generate(lend_engine(name), make_requests(6, MIXED))
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


@pytest.mark.parametrize("name", MODELS)
def test_engine_generates_with_the_weights_written_last(name: str) -> None:
    engine, model = lend_engine(name), reference_of(name, seed=1)
    request = Request(0, (3, 4, 5), 0, SamplingParams(temperature=0.0, max_new_tokens=12))
    before = generate(engine, [request])[0]
    write_weights(engine, model, version=1)
    after = generate(engine, [request])[0]
    assert (before.version, after.version, engine.version) == (0, 1, 1)
    assert before.tokens != after.tokens
    np.testing.assert_allclose(
        after.logps, expected_logps(model, request, after), rtol=0, atol=LOGP_TOLERANCE
    )


@pytest.mark.parametrize("name", MODELS)
def test_engine_update_in_the_middle_keeps_tokens_and_drops_the_cache(name: str) -> None:
    engine, model = lend_engine(name), reference_of(name, seed=1)
    requests = make_requests(5, SamplingParams(temperature=0.0, max_new_tokens=12))
    engine.submit(requests)
    for _ in range(3):
        engine.step()
    partial = {r.request_id: r for r in engine.pending()}
    write_weights(engine, model, version=3)
    while engine.has_unfinished:
        engine.step()
    for completion in engine.collect():
        before = partial[completion.request_id]
        kept = len(before.tokens)
        assert kept >= 3
        assert completion.tokens[:kept] == before.tokens
        assert completion.version == 0
        expected = expected_logps(model, before, completion)[kept:]
        np.testing.assert_allclose(completion.logps[kept:], expected, rtol=0, atol=LOGP_TOLERANCE)


@pytest.mark.parametrize("name", ONE_MODEL_EACH)
def test_engine_refuses_to_generate_without_complete_weights(name: str) -> None:
    engine = make_engine(name)
    engine.begin_update()
    engine.submit(make_requests(1, SamplingParams()))
    with pytest.raises(RuntimeError, match="finish_update"):
        engine.step()


@pytest.mark.parametrize("name", ENGINES)
def test_engine_layout_describes_its_tensors(name: str) -> None:
    engine = lend_engine(name)
    tensors, layout = engine.tensors(), engine.layout()
    assert dict(layout.shapes) == {n: tuple(t.shape) for n, t in tensors.items()}
    assert ("lm_head.weight" in tensors) == ("tied" not in name)
    check_layout(layout)
    if name in PACKAGED_MODELS:
        return
    assert sorted(r.hf for r in layout.regions) == sorted(tensors)
    for region in layout.regions:
        assert region.hf == region.local
        assert region.hf_box == region.local_box
        assert region.local_box == tuple((0, size) for size in tensors[region.local].shape)


@pytest.mark.parametrize("name", ONE_MODEL_EACH)
def test_engine_refuses_an_id_held_already(name: str) -> None:
    engine = lend_engine(name)
    requests = make_requests(2, SamplingParams())
    engine.submit(requests[:1])
    with pytest.raises(ValueError, match="100 is already in use"):
        engine.submit(requests)
    assert [r.request_id for r in engine.pending()] == [100]


@pytest.mark.parametrize("name", ONE_MODEL_EACH)
def test_generate_returns_request_order(name: str) -> None:
    requests = make_requests(12, MIXED)[::-1]
    done = generate(lend_engine(name), requests)
    assert [c.request_id for c in done] == [r.request_id for r in requests]
    assert generate(lend_engine(name), []) == []


@pytest.mark.parametrize("name", ONE_MODEL_EACH)
def test_generate_needs_an_idle_engine(name: str) -> None:
    engine = lend_engine(name)
    requests = make_requests(2, SamplingParams(max_new_tokens=3))
    engine.submit(requests[:1])
    with pytest.raises(RuntimeError, match="idle engine"):
        generate(engine, requests[1:])


@pytest.mark.parametrize("name", ONE_MODEL_EACH[1:])
@pytest.mark.parametrize(
    ("version", "named", "reason"),
    [
        (4, "train.learning_rate", "weights grew until lm_head.weight is not finite after"),
        (0, "model", "initial weights of which lm_head.weight is not finite"),
    ],
)
def test_engine_names_the_request_of_a_non_finite_logp_and_the_weights_that_explain_it(
    name: str, version: int, named: str, reason: str
) -> None:
    engine = make_engine(name)
    engine.begin_update()
    engine.tensors()["lm_head.weight"].fill_(float("nan"))
    engine.finish_update(version)
    with pytest.raises(UserError, match=rf"request 100 \(weights version {version}\)") as caught:
        generate(engine, make_requests(1, SamplingParams()))
    assert caught.value.name == named and reason in str(caught.value)


def test_hf_engine_prefills_contexts_over_the_forward_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = make_requests(20, MIXED)
    expected = generate(make_engine("qwen3", max_batch=32), requests)
    monkeypatch.setattr("hybridrl.rollout.hf.adapter.PREFILL_TOKENS", 10)
    monkeypatch.setattr("hybridrl.rollout.hf.adapter.PREFILL_LOGITS", 4)
    monkeypatch.setattr("hybridrl.rollout.hf.slot_cache.CACHE_BLOCK", 2)
    found = generate(make_engine("qwen3", max_batch=32), requests)
    assert all(close(one, two) for one, two in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "no-such-type"}, "no-such-type"),
        ({"model_type": None}, "model_type: got None"),
        ({"hidden_size": "32"}, "transformers rejects"),
        ({"rope_parameters": 3}, "transformers rejects"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type: got dynamic"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "LlamaForCausalLM.*the type of Qwen3ForCausalLM"),
        ({"model_type": "llama4_text", "num_local_experts": 2}, "chunked_attention"),
    ],
)
def test_hf_engine_refuses_what_it_would_decode_wrongly(
    change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ModelError, match=expected):
        HfEngine({**TINY, "model_type": "llama", **change})


def test_hf_engine_takes_longrope_whose_factors_are_settled() -> None:
    """Rows on both sides of the original length turn by the same angles, as in transformers."""
    rope = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.4, 2.0]}
    fields = {**TINY, "model_type": "phi3", "original_max_position_embeddings": 16}
    fields["rope_parameters"] = {**rope, "long_factor": [1.0, 3.0, 5.0, 8.0]}
    with pytest.raises(ModelError, match="rope_type: got longrope"):
        HfEngine(fields)
    engine = HfEngine(at_length(fields, 40))
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    write_weights(engine, reference, 0)
    greedy = SamplingParams(temperature=0, max_new_tokens=20)
    requests = make_requests(5, greedy)
    for request, done in zip(requests, generate(engine, requests), strict=True):
        whole = torch.tensor(request.prompt + done.tokens)
        with torch.no_grad():
            padded = torch.nn.functional.pad(whole, (0, 40 - len(whole)))[None]
            logp = reference(padded).logits[0, len(request.prompt) - 1 : len(whole) - 1]
        assert tuple(logp.argmax(-1).tolist()) == done.tokens
        expected = logp.log_softmax(-1)[range(20), list(done.tokens)]
        assert np.allclose(expected.numpy(), done.logps, atol=LOGP_TOLERANCE)


def test_hf_engine_needs_no_key_that_changes_no_number() -> None:
    odd = {"pad_token_id": 999, "return_dict": False, "id2label": 3, "dtype": "bfloat16"}
    engine = HfEngine({**HF_MODELS["qwen3"], **odd})
    write_weights(engine, reference_of("qwen3"), 0)
    requests = make_requests(3, MIXED)
    assert generate(engine, requests) == generate(lend_engine("qwen3"), requests)


def test_hf_engine_reads_a_model_directory(tmp_path: Any) -> None:
    reference_of("qwen3").config.save_pretrained(tmp_path)
    engine = HfEngine(tmp_path)
    write_weights(engine, reference_of("qwen3"), 0)
    requests = make_requests(3, MIXED)
    assert generate(engine, requests) == generate(lend_engine("qwen3"), requests)


def test_scripted_engine_returns_what_the_script_says() -> None:
    script = {100: ((5, 6, STOP), (-0.1, -0.2, -0.3)), 101: ((7,) * 9, (-0.5,) * 9)}
    engine = ScriptedEngine(lambda request: script[request.request_id], shapes={})
    engine.begin_update()
    engine.finish_update(2)
    sampling = SamplingParams(max_new_tokens=4, stop_token_ids=(STOP,))
    done = generate(engine, make_requests(2, sampling))
    assert done[0] == Completion(100, (5, 6, STOP), (-0.1, -0.2, -0.3), "stop", 2)
    assert done[1] == Completion(101, (7,) * 4, (-0.5,) * 4, "length", 2)


def test_scripted_engine_names_the_request_whose_script_ends_early() -> None:
    engine = ScriptedEngine(lambda _: ((5, 6), (-0.1, -0.2)), shapes={})
    engine.begin_update()
    engine.finish_update(0)
    with pytest.raises(ValueError, match="request 100 ends after 2 tokens"):
        generate(engine, make_requests(1, SamplingParams(max_new_tokens=3)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SamplingParams(temperature=-0.1), "temperature=-0.1"),
        (lambda: SamplingParams(temperature=float("nan")), "temperature=nan"),
        (lambda: SamplingParams(top_p=0.0), "top_p=0.0"),
        (lambda: SamplingParams(top_k=-1), "top_k=-1"),
        (lambda: SamplingParams(max_new_tokens=0), "max_new_tokens=0"),
        (lambda: Request(3, (), 0, SamplingParams()), "request 3 has an empty prompt"),
        (lambda: Request(3, (1,), -1, SamplingParams()), "seed -1"),
        (lambda: Request(3, (1,), 0, SamplingParams(), (4,), (), 0), "1 tokens but 0"),
        (lambda: Request(3, (1,), 0, SamplingParams(), (4,), (-1.0,)), "version None"),
        (
            lambda: Request(3, (1,), 0, SamplingParams(max_new_tokens=1), (4,), (-1.0,), 0),
            "already finished",
        ),
    ],
)
def test_request_refuses_impossible_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_request_seed_is_stable_and_spread() -> None:
    assert request_seed(0, 1, 2) == 3662037204992188296
    seeds = {request_seed(r, s, i) for r in range(4) for s in range(10) for i in range(100)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_uniforms_are_uniform_over_neighbouring_seeds_and_counts() -> None:
    seeds, counts = np.meshgrid(np.arange(200), np.arange(200))
    drawn = uniforms(seeds.ravel(), counts.ravel()).reshape(200, 200)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    histogram = np.histogram(drawn, bins=50, range=(0, 1))[0]
    # Chi-square of 49 degrees: five sigma, on fixed numbers.
    assert ((histogram - 800) ** 2 / 800).sum() < 49 + 5 * 98**0.5
    assert abs(np.corrcoef(drawn[:, :-1].ravel(), drawn[:, 1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.02
