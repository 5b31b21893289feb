"""Tokens that an engine could draw, and the trainer's probabilities over them. Real Megatron."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import (
    LOGP_TOLERANCE,
    STOP,
    VOCAB,
    close_engines,
    full_logits,
    make_engine,
    make_reference,
    make_requests,
)
from packaged import needs
from small_runs import small_run
from torch import Tensor

from hybridrl.algorithms.grpo import Grpo
from hybridrl.config.schema import GrpoConfig, TrainConfig
from hybridrl.contracts.batch import BatchError, Producer, Prompt, Rollout, RolloutBatch, TrainBatch
from hybridrl.contracts.blobs import Blobs
from hybridrl.contracts.likely_tokens import LIKELY_LOGPS, LIKELY_TOKENS
from hybridrl.generation.saved_rollouts import saved_fields
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.mesh import Mesh
from hybridrl.roles.policy import Policy
from hybridrl.rollout.engine import Completion, Request, SamplingParams, generate
from hybridrl.training.model import ModelSource, ParallelModel

SAMPLES = 3  # of a prompt
TRUNCATED = SamplingParams(0.9, 0.8, 7, 12, (STOP,), num_likely=7)
NAMES = ["qwen3", pytest.param("vllm-qwen3", marks=needs("vllm"))]


@pytest.fixture(autouse=True)
def closed_engines() -> Iterator[None]:
    yield
    close_engines()


def sets_of(blobs: Blobs) -> dict[int, dict[int, float]]:
    """Returns each recorded token's index in its sample, with the likely tokens' probabilities."""
    found: dict[int, dict[int, float]] = {}
    for entry, logp in zip(blobs[LIKELY_TOKENS].tolist(), blobs[LIKELY_LOGPS], strict=True):
        if entry < 0:
            found[-1 - entry] = current = {}
        else:
            assert entry not in current
            current[entry] = float(logp)
    return found


def kept(logits_V: Tensor, sampling: SamplingParams) -> dict[int, float]:
    """Returns the tokens that could be drawn, by the definition of temperature, top-k and top-p."""
    prob = (logits_V / sampling.temperature).softmax(-1)
    order = prob.argsort(descending=True)[: sampling.top_k or VOCAB]
    before = (prob[order] / prob[order].sum()).cumsum(0) - prob[order] / prob[order].sum()
    order = order[before < sampling.top_p]
    return dict(zip(order.tolist(), (prob[order] / prob[order].sum()).log().tolist(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_engines_record_the_tokens_that_they_could_draw(mesh: Mesh, name: str) -> None:
    """Also of requests that are interrupted and continue, alone or with others that record less."""
    engine, model = make_engine(name), make_reference(name)
    wanted = [
        TRUNCATED,
        replace(TRUNCATED, top_p=1.0, max_new_tokens=20),
        replace(TRUNCATED, top_p=1.0, top_k=0, num_likely=5),
        SamplingParams(max_new_tokens=9),
        SamplingParams(0.0, max_new_tokens=9),
    ]
    requests = make_requests(10, wanted)
    engine.submit(requests)
    for _ in range(6):
        engine.step()
    saved = [json.loads(json.dumps(saved_fields(one))) for one in engine.pending()]
    begun = [Request.from_dict(fields) for fields in saved]
    done = {one.request_id: one for one in engine.collect()}
    engine.clear()
    assert any(len(one.tokens) > 3 for one in begun)
    done |= {one.request_id: one for one in generate(engine, begun)}
    sizes = set()
    for request in requests:
        one, sampling = done[request.request_id], request.sampling
        if not sampling.num_likely:
            assert not one.blobs
            continue
        found, start = sets_of(one.blobs), len(request.prompt)
        assert list(found) == list(range(start, start + len(one.tokens)))
        for place, logits_V in enumerate(full_logits(model, request, one)):
            likely, expected = found[start + place], kept(logits_V, sampling)
            drawn = one.tokens[place]
            assert next(iter(likely)) == drawn
            assert likely[drawn] == pytest.approx(one.logps[place], abs=1e-6)
            if not sampling.top_k:
                most = list(expected)[: sampling.num_likely]
                expected = {token: expected[token] for token in {drawn, *most}}
            assert likely == pytest.approx(expected, abs=LOGP_TOLERANCE)
            sizes.add(len(likely))
    assert min(sizes) < 3 and max(sizes) == 7


def rollouts_of(engine: Any, sampling: SamplingParams = TRUNCATED) -> TrainBatch:
    """Returns responses of the engine, several to each prompt."""
    prompts = [request.prompt for request in make_requests(4, sampling)]
    requests = [
        replace(request, prompt=prompts[i // SAMPLES])
        for i, request in enumerate(make_requests(4 * SAMPLES, sampling))
    ]
    return batch_of(requests, generate(engine, requests))


def batch_of(requests: list[Request], completions: list[Completion]) -> TrainBatch:
    made = [
        Rollout(
            number,
            Prompt(number // SAMPLES, "", request.prompt),
            done.tokens,
            done.logps,
            done.finish_reason,
            done.version,
            blobs=done.blobs,
        )
        for number, (request, done) in enumerate(zip(requests, completions, strict=True))
    ]
    here = Producer.here("the test")
    batch = RolloutBatch.from_rollouts(made, [i // SAMPLES for i in range(len(made))], here)
    return batch.scored(torch.zeros(batch.num_samples), {}, here).to_train(here)


def trainer(mesh: Mesh, folder: Path, shares: bool, temperature: float) -> Policy:
    mesh.platform.seed(1)
    hf_config = json.loads((folder / "config.json").read_text())
    family = resolve_family(None, hf_config)
    source = ModelSource(family, hf_config, torch.float32, family.name, folder)
    model = ParallelModel(
        mesh, source, "lm", TrainConfig(micro_batch_tokens=512, share_prompts=shares)
    )
    load_hf(folder, model.layout(), model.weights(), hf_shapes(family, source.shape))
    return Policy(model, Grpo(GrpoConfig()), 1, temperature)


@pytest.mark.parametrize("name", NAMES)
def test_replay_gives_the_engines_log_probabilities(mesh: Mesh, tmp_path: Path, name: str) -> None:
    engine = make_engine(name)
    batch = rollouts_of(engine)
    make_reference(name).save_pretrained(tmp_path)
    for shares in (True, False):
        policy = trainer(mesh, tmp_path, shares, TRUNCATED.temperature)
        missed_T = policy.logprobs(batch)
        assert float((missed_T - batch.behaviour_logp_T).abs().max()) > 0.1
        policy.model.use_likely_tokens(True, False, TRUNCATED.num_likely)
        gap_T = (policy.logprobs(batch) - batch.behaviour_logp_T).abs()
        assert float(gap_T.max()) < LOGP_TOLERANCE, shares
    with pytest.raises(BatchError, match="sampling_replay=rollout"):
        policy.logprobs(batch.with_blobs())
    blob, here = batch.blobs[LIKELY_TOKENS], Producer.here("the test")
    entries_N = blob.values_N
    is_first_N = entries_N < 0
    swapped_N = entries_N.clone()
    drawn_R = is_first_N.nonzero()[:, 0] + 1
    swapped_N[drawn_R] = entries_N[drawn_R].roll(1)
    for wrong_N, said in (
        (torch.where(is_first_N, entries_N - 1, entries_N), r"\(0, \d+\) instead of \(0, \d+\)"),
        (torch.where(is_first_N, entries_N, entries_N + VOCAB), f"below {VOCAB}"),
        (swapped_N, "other drawn tokens"),
    ):
        wrong = batch.join_blob(here, LIKELY_TOKENS, replace(blob, values_N=wrong_N))
        with pytest.raises(BatchError, match=said):
            policy.logprobs(wrong)


def test_turns_of_an_environment_keep_the_sets_of_earlier_turns(mesh: Mesh, tmp_path: Path) -> None:
    """Observations between turns have none. A turn may end by its length, or be interrupted."""
    engine, model = make_engine("qwen3"), make_reference("qwen3")
    model.save_pretrained(tmp_path)
    made = []
    for number, request in enumerate(make_requests(4, TRUNCATED)):
        (first,) = generate(engine, [request])
        observed = (5, 6, 7)[: number % 3 + 1]
        prompt = (*request.prompt, *first.tokens, *observed)
        engine.submit([Request(number, prompt, number, TRUNCATED, blobs=first.blobs)])
        for _ in range(2):
            engine.step()
        (last,) = engine.collect() or generate(engine, take_pending(engine))
        mask = (False,) * len(first.tokens) + (True,) * len(observed)
        made.append(
            Rollout(
                number,
                Prompt(number, "", request.prompt),
                (*first.tokens, *observed, *last.tokens),
                (*first.logps, *[0.0] * len(observed), *last.logps),
                last.finish_reason,
                last.version,
                observed=mask + (False,) * len(last.tokens),
                blobs=last.blobs,
            )
        )
    here = Producer.here("the test")
    scored = RolloutBatch.from_rollouts(made, list(range(4)), here)
    batch = scored.scored(torch.zeros(4), {}, here).to_train(here)
    policy = trainer(mesh, tmp_path, False, TRUNCATED.temperature)
    policy.model.use_likely_tokens(True, False, TRUNCATED.num_likely)
    gap_T = (policy.logprobs(batch) - batch.behaviour_logp_T).abs()
    assert float(gap_T.max()) < LOGP_TOLERANCE


def take_pending(engine: Any) -> list[Request]:
    begun: list[Request] = engine.pending()
    engine.clear()
    return begun


RUN = (
    "rollout.engine=hf",
    "rollout.top_k=6",
    "rollout.top_p=0.9",
    "algorithm.kl_coef=0.1",
    "algorithm.entropy_coef=0.01",
)

WHOLE = ("rollout.top_k=0", "rollout.top_p=1")


def test_a_run_with_truncation_trains_on_what_its_engine_samples(tmp_path: Path) -> None:
    """The comparison at the start of a run replays too."""
    replay, centering = "algorithm.sampling_replay=rollout", "algorithm.score_centering=true"
    found = {}
    for name, more in (
        ("missed", ()),
        ("replayed", (replay,)),
        ("centered", (replay, centering)),
        ("twice", (replay, centering, "steps.updates_per_step=2")),
        ("whole", WHOLE),
        ("whole, centered", (*WHOLE, centering)),
    ):
        with small_run(tmp_path / name, *RUN, *more) as run:
            found[name] = run.train_step()
    missed = found.pop("missed")
    assert missed["mismatch/logprob_diff_mean"] > 0.05
    for name, metrics in found.items():
        assert metrics["mismatch/logprob_diff_max"] < LOGP_TOLERANCE, name
        assert name.startswith("whole") or metrics["policy/entropy"] < missed["policy/entropy"]
    # In the first update both sides have the same distribution, whose mean score is 0.
    norm = "policy/grad_norm"
    assert found["replayed"][norm] == pytest.approx(found["centered"][norm], rel=1e-3)
    assert found["twice"][norm] != pytest.approx(found["centered"][norm], rel=1e-3)
    assert found["whole"][norm] == pytest.approx(found["whole, centered"][norm], rel=1e-3)
