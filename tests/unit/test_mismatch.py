"""The numbers of a mismatch, its warning, and what is concluded from it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from batches import rollout_batch

from hybridrl.cli.check import judge_engines
from hybridrl.config.load import load_config_dict
from hybridrl.config.schema import Config
from hybridrl.debug.verdicts import (
    Answer,
    Finding,
    Tokenwise,
    judge_numerics,
    judge_routing,
    judge_sampling,
    judge_tokens,
    mean_difference,
)
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.engine import Completion, SamplingParams
from hybridrl.training.mismatch import BOUNDS, MEAN, MismatchWarning, mismatch_metrics


def config(*overrides: str) -> Config:
    content = {"run": {"name": "x"}, "model": {"init": "x"}, "algorithm": {"name": "grpo"}}
    return load_config_dict(content, overrides)


def answers(engine: str, *responses: tuple[list[int], list[float]]) -> dict[str, Any]:
    greedy = [{"tokens": tokens, "logps": logps} for tokens, logps in responses]
    return {
        "engine": engine,
        "tokens": {"details": {"greedy": greedy}},
        "numerics": {"details": {"bound": 0.02}},
    }


def test_two_engines_are_compared_up_to_the_first_token_that_differs() -> None:
    one = answers("vllm", ([5, 6, 7], [-1.0, -0.5, -0.25]), ([8, 9], [-1.0, -3.0]))
    tied = answers("sglang", ([5, 2, 3], [-1.0, -0.51, -9.0]), ([8, 9], [-1.03, -3.0]))
    found = judge_engines(one, tied)
    assert found["agrees"] and found["details"]["num_others"] == 1
    assert found["details"]["num_tokens"] == 4
    assert found["details"]["diff_mean"] == pytest.approx((0.01 + 0.03) / 4)
    other = answers("sglang", ([5, 6, 7], [-1.0, -0.5, -0.25]), ([8, 9], [-1.0, -3.2]))
    found = judge_engines(one, other)
    assert not found["agrees"] and "0.04 nats" in found["found"] and found["remedy"]
    lost = {**other, "tokens": {"details": {}}}
    assert not judge_engines(one, lost)["agrees"]


FP32 = BOUNDS[torch.float32]


@pytest.mark.parametrize("scale", [1e-7, 1e-2, 1.0])
def test_mismatch_metrics_are_their_formulas_in_float64(scale: float) -> None:
    batch = rollout_batch(num_prompts=40)
    mask = batch.response_mask_T.numpy()
    noise = np.random.default_rng(0).normal(size=len(mask)) * scale
    trainer_T = torch.from_numpy((batch.behaviour_logp_T.numpy() + noise).astype(np.float32))
    trainer_T[~batch.response_mask_T] = 77.0  # prompt tokens are not sampled
    engine = [float(x) for x in batch.behaviour_logp_T[batch.response_mask_T]]
    trainer = [float(x) for x in trainer_T[batch.response_mask_T]]
    gaps = [t - e for t, e in zip(trainer, engine, strict=True)]
    k3 = [math.fsum((d**2 / 2, d**3 / 6)) if abs(d) < 1e-4 else math.exp(d) - 1 - d for d in gaps]
    found = mismatch_metrics(batch, trainer_T)
    assert found == pytest.approx(
        {
            "mismatch/logprob_diff_mean": math.fsum(map(abs, gaps)) / len(gaps),
            "mismatch/logprob_diff_max": max(map(abs, gaps)),
            "mismatch/share_above_0.1": sum(abs(gap) > 0.1 for gap in gaps) / len(gaps),
            "mismatch/kl": math.fsum(k3) / len(gaps),
            "mismatch/correlation": np.corrcoef(engine, trainer)[0, 1],
        },
        rel=1e-7,
    )
    assert found["mismatch/kl"] > 0


def test_warning_comes_once_and_then_every_50_steps() -> None:
    warning = MismatchWarning(torch.bfloat16, config())
    small, large = {MEAN: 0.0199}, {MEAN: 0.0201}
    assert warning.text(1, small) is None and warning.text(2, {}) is None
    first = warning.text(3, large)
    assert first is not None
    for part in ("step 3", MEAN, "0.02", "bfloat16", "hybridrl check --mismatch CONFIG"):
        assert part in first
    told = [step for step in range(4, 160) if warning.text(step, large) is not None]
    assert told == [53, 103, 153]
    assert MismatchWarning(torch.float32, config()).text(1, {MEAN: 0.002}) is not None
    exact = MismatchWarning(torch.bfloat16, config("numerics.match=exact"))
    assert exact.text(1, {MEAN: 0.0}) is None
    said = exact.text(1, {MEAN: 1e-9})
    assert said is not None and "numerics.match=exact" in said


LAYOUT = RolloutLayout.consecutive(4, 2)
PARAMS = SamplingParams(1.0, top_p=0.5)


def answer(tokens: tuple[int, ...], logps: tuple[float, ...], is_greedy: bool = True) -> Answer:
    return Answer(0, is_greedy, Completion(0, tokens, logps, "length", 0))


def said(choice: list[int], best: list[float], own: list[float], cut: list[float]) -> Tokenwise:
    columns = (torch.tensor(x) for x in (best, own, cut, own))
    return Tokenwise(torch.tensor(choice), *columns)


def tokens_of(drawn: list[tuple[int, ...]], trainer: Tokenwise, tie: float = 1e-3) -> Finding:
    by_rank = [[answer(tokens, (-1.0, -1.0))] for tokens in drawn]
    spans = [[(by_rank[rank][0], slice(0, 2))] for rank in (0, 2)]
    return judge_tokens(LAYOUT, by_rank, spans, trainer, tie)


def test_tokens_agree_up_to_near_ties() -> None:
    trainer = said([5, 6], [-1.0, -1.0], [-1.0, -1.0005], [0.0, 0.0])
    assert tokens_of([(5, 6)] * 4, trainer).agrees
    near = tokens_of([(5, 7)] * 4, trainer)
    assert near.agrees and near.details["num_near_ties"] == 2
    far = tokens_of([(5, 7)] * 4, trainer, tie=1e-4)
    assert (
        not far.agrees and "at position 1" in far.found and "token 7 and the trainer 6" in far.found
    )
    apart = tokens_of([(5, 6), (5, 6), (5, 6), (5, 5)], trainer)
    assert not apart.agrees and "rank 3 sampled different tokens than rank 2" in apart.found


def test_sampling_tells_truncation_from_numerics() -> None:
    half = -math.log(2)
    pairs = [(answer((1, 2), (0.0, 0.0), is_greedy=False), slice(0, 2))]
    truncated = judge_sampling(
        [pairs], said([1, 2], [half] * 2, [half] * 2, [0.0] * 2), PARAMS, 1e-3
    )
    assert not truncated.agrees and "rollout.top_p=1" in truncated.remedy
    assert truncated.details["from_truncation"] == pytest.approx(-half)
    assert truncated.details["diff_mean_with_same_truncation"] == 0.0
    # Off by the same amount, but nothing is cut off: not the support, but how they compute.
    trainer = said([1, 2], [half] * 2, [half] * 2, [half] * 2)
    assert judge_sampling([pairs], trainer, PARAMS, 1e-3).agrees
    greedy = [(answer((1, 2), (half, half)), slice(0, 2))]
    total, replica = mean_difference([[*greedy, *greedy], [*greedy, *pairs]], trainer)
    assert (total, replica) == (pytest.approx(-half / 2), 1)  # two tokens of four, in the second
    outside = said([1, 2], [half] * 2, [half] * 2, [half, -math.inf])
    assert judge_sampling([pairs], outside, PARAMS, 1e-3).details["num_outside"] == 1
    assert not judge_sampling([pairs], outside, PARAMS, 1e-3).agrees


def test_sampling_judges_what_the_run_replays() -> None:
    """A missed replay shows as the difference that truncation causes."""
    half = -math.log(2)
    pairs = [(answer((1, 2), (0.0, 0.0), is_greedy=False), slice(0, 2))]
    params = replace(PARAMS, top_k=1)
    replayed = said([1, 2], [half] * 2, [0.0] * 2, [0.0] * 2)
    assert judge_sampling([pairs], replayed, params, 1e-3, run_replays=True).agrees
    missed = said([1, 2], [half] * 2, [half] * 2, [0.0] * 2)
    found = judge_sampling([pairs], missed, params, 1e-3, run_replays=True)
    assert not found.agrees and "Wrong tokens" in found.remedy


def test_numerics_names_the_stage_or_says_that_rounding_adds_up() -> None:
    def table(*differences: float) -> list[dict[str, object]]:
        names = ("embedding", "layers.0.attention", "layers.0.mlp", "norm")
        return [{"stage": n, "difference": d} for n, d in zip(names, differences, strict=True)]

    assert judge_numerics(table(0, 1e-7, 2e-7, 2e-7), 1e-6, 0, FP32).agrees
    broken = judge_numerics(table(0, 0.3, 0.4, 0.4), 0.9, 1, FP32)
    assert not broken.agrees and broken.details["first"] == "layers.0.attention"
    assert "rope" in broken.remedy and "replica 1" in broken.found
    rounding = judge_numerics(table(0, 9e-6, 5e-5, 2e-4), 2e-3, 0, FP32)
    assert not rounding.agrees and rounding.details["first"] is None
    assert "float32" in rounding.remedy


@pytest.mark.parametrize(
    ("own", "replayed", "run_replays", "agrees", "remedy"),
    [
        (0.0, 0.0, False, True, ""),
        (1.0, 0.0, False, False, "router_replay=rollout"),
        (1.0, 0.0, True, True, ""),
        (1.0, 1.0, False, False, "checks above"),
        (0.0, 1.0, True, False, "checks above"),
    ],
)
def test_routing_is_judged_by_the_experts_that_the_run_takes(
    own: float, replayed: float, run_replays: bool, agrees: bool, remedy: str
) -> None:
    """One greedy answer; the sampled one, which is far away, does not count."""
    engine = (-1.0, -2.0)
    placed = [
        [
            (Answer(0, True, Completion(0, (5, 6), engine, "length", 0)), slice(1, 3)),
            (Answer(0, False, Completion(1, (7,), (-90.0,), "length", 0)), slice(3, 4)),
        ]
    ]
    logp_T = torch.tensor([0.0, *engine, -1.0])
    zero_T = torch.zeros(4)
    said = Tokenwise(zero_T.long(), zero_T, logp_T - replayed, zero_T, zero_T)
    found = judge_routing(placed, said, logp_T - own, 0.1, run_replays)
    assert found.agrees is agrees and remedy in found.remedy and bool(found.remedy) is not agrees
    assert found.details["diff_mean"] == pytest.approx(own)
    assert found.details["diff_mean_with_engines_experts"] == pytest.approx(replayed)
