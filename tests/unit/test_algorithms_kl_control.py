"""The adaptive coefficient of the KL: its formula, what it changes, and its state."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import train_batch
from test_algorithms_advantage import responses

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.policy_gradient import AdaptiveKl
from hybridrl.config.schema import GrpoConfig, PpoConfig
from hybridrl.training.batches.collation import micro_batch

ADAPTIVE = {"kl_coef": 0.2, "kl_target": 3.0, "kl_horizon": 60}


def test_the_coefficient_follows_ziegler_over_50_steps() -> None:
    """e = clip(KL / target - 1, -0.2, 0.2), coefficient *= 1 + e n / horizon."""
    algorithm, coefficient = make_algorithm(PpoConfig(**ADAPTIVE)), 0.2
    seen = []
    for seed in range(50):
        batch = train_batch(3, 2, seed)
        batch = replace(batch, old_logp_T=batch.old_logp_T + 0.75 * batch.response_mask_T)
        columns = (batch.old_logp_T, batch.reference_logp_T)
        pairs = zip(*(responses(batch, column) for column in columns), strict=True)
        kl = np.mean([(old - reference).sum() for old, reference in pairs])
        found = algorithm.after_step(batch)
        assert found["policy/kl_coef"] == pytest.approx(coefficient, rel=1e-6)
        assert found["policy/kl_sequence"] == pytest.approx(kl, rel=1e-6)
        error = kl / 3.0 - 1
        seen.append(error)
        coefficient *= 1 + min(max(error, -0.2), 0.2) * 6 / 60
    assert algorithm.kl_coef == pytest.approx(coefficient, rel=1e-6)
    assert min(seen) < -0.2 and max(seen) > 0.2 and any(abs(e) < 0.2 for e in seen)


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_the_adapted_coefficient_is_that_of_the_next_step(kl_in: str) -> None:
    batch = train_batch(3, 4)
    adaptive = make_algorithm(GrpoConfig(**ADAPTIVE, kl_in=kl_in))
    adaptive.after_step(batch)
    fixed = make_algorithm(GrpoConfig(kl_coef=adaptive.kl_coef, kl_in=kl_in))
    losses = []
    for algorithm in (adaptive, fixed, make_algorithm(GrpoConfig(kl_coef=0.2, kl_in=kl_in))):
        micro = micro_batch(algorithm.advantages(batch), range(12), 1, 1)
        logp_S = micro.old_logp_S + 0.1
        losses.append(float(algorithm.loss(logp_S, torch.zeros_like(logp_S), micro, 1.0).loss))
    assert losses[0] == losses[1] != losses[2]


def test_a_state_brings_the_coefficient_back_through_json() -> None:
    algorithm = make_algorithm(PpoConfig(**ADAPTIVE))
    for seed in range(5):
        algorithm.after_step(train_batch(3, 2, seed))
    state = json.loads(json.dumps(algorithm.state()))
    other = make_algorithm(PpoConfig(**ADAPTIVE))
    other.load_state(state)
    assert other.kl_coef == algorithm.kl_coef != 0.2


def test_the_coefficient_stays_positive_and_survives_a_step_that_is_skipped() -> None:
    control = AdaptiveKl(target=6.0, horizon=1000)
    assert control.next(0.2, 0.0, 8192) == pytest.approx(0.2 * 0.8)
    assert control.next(0.2, 60.0, 8192) == pytest.approx(0.2 * 1.2)
    for kl in (math.nan, math.inf):
        assert control.next(0.2, kl, 64) == 0.2
