"""Names, combination and derived numbers of a step's metrics."""

from __future__ import annotations

import pytest

from hybridrl.metrics.values import (
    SKIPPED,
    STEP_KEYS,
    average,
    largest,
    rank_spread,
    step_metrics,
)


def test_average_takes_means_and_the_largest_of_maxima() -> None:
    parts = [
        {"policy/loss": 1.0, "mismatch/logprob_diff_max": 0.5},
        {"policy/loss": 3.0, "mismatch/logprob_diff_max": 0.2, "critic/loss": 7.0},
    ]
    assert average(parts) == {
        "policy/loss": 2.0,
        "mismatch/logprob_diff_max": 0.5,
        "critic/loss": 7.0,
    }
    assert average([]) == {}


def test_average_adds_up_skipped_steps() -> None:
    assert average([{SKIPPED: 1.0}, {SKIPPED: 0.0}, {SKIPPED: 1.0}]) == {SKIPPED: 2.0}


def test_ranks_times_are_the_slowest_and_their_spread() -> None:
    ranks = [
        {"update": 2.0, "step": 3.0},
        {"update": 2.5, "step": 2.75},
        {"update": 1.0, "step": 3.0},
    ]
    assert largest(ranks) == {"update": 2.5, "step": 3.0}
    assert rank_spread(ranks) == {
        "time_min_s/update": 1.0,
        "slowest_rank/update": 1.0,
        "time_min_s/step": 2.75,
        "slowest_rank/step": 0.0,
    }
    assert rank_spread(ranks[:1]) == {}


def test_step_metrics_derives_throughput_and_names_every_phase() -> None:
    seconds = {"generate": 1.0, "update": 2.5, "evaluate": 0.25, "step": 4.0}
    peaks = {"run": 3 * 2**30, "update": 2**30}
    flops = {"update": 10**12, "generate": 3 * 10**11}
    found = step_metrics({"reward/mean": 0.5}, seconds, 800, 4, peaks, flops, 1e12)
    assert found["reward/mean"] == 0.5
    assert found["throughput/tokens_per_s_per_gpu"] == pytest.approx(800 / 4.0 / 4)
    assert (found["memory/peak_gib"], found["memory/peak_gib/update"]) == (3.0, 1.0)
    assert found["time_share/update"] == 2.5 / 4.0 and found["time_share/reward"] == 0.0
    assert found["flops/step"] == 1.3e12 and found["flops/logprobs"] == 0.0
    # 1e12 FLOPs in 2.5 s on 4 GPUs of 1e12 a second; a phase without FLOPs has no rate.
    assert found["mfu/update"] == pytest.approx(0.1)
    assert found["mfu/step"] == pytest.approx(1.3 / 4 / 4)
    assert "mfu/logprobs" not in found
    assert not any(key.startswith("mfu") for key in step_metrics({}, seconds, 1, 1, peaks, flops))
    assert found["time_s/generate"] == 1.0
    assert found["time_s/reshard"] == 0.0
    assert found["time_s/evaluate"] == 0.25
    assert {key for key in STEP_KEYS if key.startswith("time_s/")} <= set(found)
