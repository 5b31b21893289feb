"""Reward-model training against its formula in float64 NumPy, and what the loop counts on: any cut
into micro-batches and any order of pairs gives the same gradient.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from batches import feedback_batch

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.preference import feedback_metrics
from hybridrl.checkpoint.folders import SavedState
from hybridrl.config.schema import RewardModelConfig
from hybridrl.config.supervised import PAIR_MARGIN
from hybridrl.contracts.batch import Producer, TrainBatch
from hybridrl.loop.checkpoints import load_run_state, run_state
from hybridrl.training.batches.collation import micro_batch

NUM_BATCHES = 40
CONFIG = RewardModelConfig(margin=0.3, center_coef=0.05)
SLOPE = 1e-6  # float32 advantages; the differences' own error is below 1e-8


def made(seed: int, num: int = 4) -> TrainBatch:
    batch = feedback_batch("pairs", num, seed)
    rng = random.Random(seed)
    # Both sides of a pair are of the same row.
    margins = {prompt.prompt_id: rng.choice([{}, {PAIR_MARGIN: 0.7}]) for prompt in batch.prompts}
    prompts = tuple(replace(p, columns=margins[p.prompt_id]) for p in batch.prompts)
    values_T = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed)).mul(2)
    values_T *= batch.response_mask_T
    return replace(batch, prompts=prompts).join_columns(Producer.here("test"), values_T=values_T)


def scores(batch: TrainBatch) -> np.ndarray:
    ends = np.cumsum(batch.lengths_B.numpy()) - 1
    return batch.values_T.double().numpy()[ends]


def formula(score_B: np.ndarray, batch: TrainBatch) -> float:
    """2203.02155, eq. 1; 2307.09288, eq. 2; 2312.09244, sec. 2. Chosen responses come first."""
    losses = []
    n = len(score_B) // 2
    for i in range(n):
        c, r = float(score_B[i]), float(score_B[n + i])
        margin = 0.3 + batch.prompts[i].columns.get(PAIR_MARGIN, 0.0)
        losses.append(np.logaddexp(0.0, -(c - r - margin)) + 0.05 * (c + r) ** 2)
    return float(np.mean(losses))


def test_loss_and_gradient_are_those_of_the_papers() -> None:
    algorithm = make_algorithm(CONFIG)
    for seed in range(NUM_BATCHES):
        batch = made(seed)
        filled = algorithm.advantages(batch)
        s = scores(batch)
        assert feedback_metrics(filled)["policy/loss"] == pytest.approx(formula(s, batch), abs=1e-6)
        ends = (batch.lengths_B.cumsum(0) - 1).tolist()
        n, e = batch.num_samples / 2, 1e-5
        for i, end in enumerate(ends):
            up, down = s.copy(), s.copy()
            up[i] += e
            down[i] -= e
            slope = (formula(up, batch) - formula(down, batch)) / (2 * e)
            assert -float(filled.advantages_T[end]) / n == pytest.approx(slope, abs=SLOPE)
        elsewhere = torch.ones(batch.num_tokens, dtype=torch.bool)
        elsewhere[ends] = False
        assert not filled.advantages_T[elsewhere].any()


def gradient(batch: TrainBatch, cuts: list[tuple[int, ...]]) -> torch.Tensor:
    """Returns the gradient of the values of all tokens, in order of sample numbers."""
    algorithm = make_algorithm(CONFIG)
    filled = algorithm.advantages(batch)
    table_V = torch.zeros(50, dtype=torch.float64, requires_grad=True)
    for cut in cuts:
        micro = micro_batch(filled, cut, 1, 1, at_own_token=True)
        values_S = table_V[micro.tokens_S]
        # What is masked must not matter.
        noise_S = torch.where(micro.loss_mask_S, 0.0, torch.nan)
        loss = algorithm.value_loss(values_S + noise_S, micro, algorithm.denominator(filled)).loss
        loss.backward()
    assert table_V.grad is not None
    return table_V.grad


def test_cuts_and_order_do_not_change_the_gradient() -> None:
    batch = made(1)
    whole = gradient(batch, [tuple(range(8))])
    assert whole.abs().max() > 1e-3
    torch.testing.assert_close(gradient(batch, [(i,) for i in range(8)]), whole)
    torch.testing.assert_close(gradient(batch, [(0, 5), (7, 2, 1), (3, 4, 6)]), whole)
    shuffled = batch.select([6, 1, 4, 0, 7, 2, 5, 3])
    torch.testing.assert_close(gradient(shuffled, [(0, 1, 2), (3, 4, 5, 6, 7)]), whole)


def test_a_checkpoint_of_an_older_version_keeps_the_token_that_it_was_trained_at() -> None:
    algorithm, said, read = make_algorithm(CONFIG), list[str](), list[str]()
    model: Any = SimpleNamespace(
        read_scores=read.append, num_updates=3, score_token="last", frozen_parts=()
    )
    state = {**run_state(3, 1.0, {}, algorithm, {"critic": model}, {})}
    state |= {"prompts": {"fingerprint": "f"}, "layout": "", "family": "llama", "dtype": "float32"}
    load_run_state(SavedState.model_validate(state), algorithm, {"critic": model}, said.append)
    assert read == ["last"] and said == []
    del state["score_token"]
    load_run_state(SavedState.model_validate(state), algorithm, {"critic": model}, said.append)
    assert read == ["last", "before_last"]
    assert len(said) == 1 and "Train the model again" in said[0]
