"""DPO's family and KTO against their papers' formulas, and what a batch must hold.

The formulas are written out below in float64 NumPy, from the papers; gradients are their central
differences. tests/unit/test_preference_trl.py compares with TRL's, where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import feedback_batch

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.preference import IMPLICIT, feedback_metrics
from hybridrl.config.schema import AlgorithmConfig, DpoConfig, KtoConfig
from hybridrl.contracts.batch import BatchError, TrainBatch
from hybridrl.training.batches.collation import micro_batch, unpack

NUM_BATCHES = 40
VALUE = 1e-6  # float32 parts of the loss
SLOPE = 1e-6  # float32 advantages; the differences' own error is below 1e-8

Sums = list[float]
Formula = Callable[[Sums, Sums, list[int]], float]


def log_sigmoid(x: float) -> float:
    return float(-np.logaddexp(0.0, -x))


def over_pairs(pair: Callable[..., float]) -> Formula:
    """Mean over pairs; chosen responses come first, the rejected ones in the same order behind."""

    def loss(logp: Sums, reference: Sums, lengths: list[int]) -> float:
        n = len(logp) // 2
        values = []
        for c, r in zip(range(n), range(n, 2 * n), strict=True):
            sides = ((logp[i], reference[i], lengths[i]) for i in (c, r))
            values.append(pair(*sides))
        return float(np.mean(values))

    return loss


@over_pairs
def dpo(chosen, rejected):  # 2305.18290, eq. 7
    (yw, rw, _), (yl, rl, _) = chosen, rejected
    return -log_sigmoid(0.1 * (yw - rw) - 0.1 * (yl - rl))


@over_pairs
def dpo_norm(chosen, rejected):  # 2411.15124, eq. 6
    (yw, rw, nw), (yl, rl, nl) = chosen, rejected
    return -log_sigmoid(5.0 / nw * (yw - rw) - 5.0 / nl * (yl - rl))


@over_pairs
def cdpo(chosen, rejected):  # ericmitchell.ai/cdpo.pdf, eq. 3
    (yw, rw, _), (yl, rl, _) = chosen, rejected
    h = (yw - rw) - (yl - rl)
    return -(1 - 0.1) * log_sigmoid(0.1 * h) - 0.1 * log_sigmoid(-0.1 * h)


@over_pairs
def ipo(chosen, rejected):  # 2310.12036, eq. 17, by length
    (yw, rw, nw), (yl, rl, nl) = chosen, rejected
    return ((yw - rw) / nw - (yl - rl) / nl - 1 / (2 * 0.1)) ** 2


@over_pairs
def simpo(chosen, rejected):  # 2405.14734, eq. 6
    (yw, _, nw), (yl, _, nl) = chosen, rejected
    return -log_sigmoid(2.0 / nw * yw - 2.0 / nl * yl - 1.0)


@over_pairs
def orpo(chosen, rejected):  # 2403.07691, eq. 3-7
    (yw, _, nw), (yl, _, nl) = chosen, rejected
    pw, pl = np.exp(yw / nw), np.exp(yl / nl)
    odds_ratio = (pw / (1 - pw)) / (pl / (1 - pl))
    return -yw / nw - 0.1 * log_sigmoid(np.log(odds_ratio))


@over_pairs
def unlike_any_preset(chosen, rejected):
    (yw, rw, nw), (yl, rl, _) = chosen, rejected
    x = 0.7 * ((yw - rw) - (yl - rl)) - 0.3
    return -0.8 * log_sigmoid(x) - 0.2 * log_sigmoid(-x) - 0.5 * yw / nw


def kto(logp: Sums, reference: Sums, lengths: list[int]) -> float:  # 2402.01306, eq. 8
    """`logp` and the rest: labelled responses, every third bad; z0 is `kto.z0`."""
    values = []
    for i, (y, r) in enumerate(zip(logp, reference, strict=True)):
        if i % 3 != 0:
            values.append(1.3 - 1.3 / (1 + np.exp(-0.2 * (y - r - kto.z0))))
        else:
            values.append(0.7 - 0.7 / (1 + np.exp(-0.2 * (kto.z0 - (y - r)))))
    return float(np.mean(values))


CASES: dict[str, tuple[AlgorithmConfig, Formula]] = {
    "dpo": (DpoConfig(), dpo),
    "dpo_norm": (DpoConfig(name="dpo_norm"), dpo_norm),
    "cdpo": (DpoConfig(name="cdpo"), cdpo),
    "ipo": (DpoConfig(name="ipo"), ipo),
    "simpo": (DpoConfig(name="simpo"), simpo),
    "orpo": (DpoConfig(name="orpo"), orpo),
    "own": (
        DpoConfig(beta=0.7, target_margin=0.3, label_smoothing=0.2, sft_coef=0.5),
        unlike_any_preset,
    ),
    "kto": (KtoConfig(beta=0.2, desirable_weight=1.3, undesirable_weight=0.7), kto),
}


def sums(column_T: torch.Tensor, batch: TrainBatch) -> Sums:
    ends = batch.offsets.tolist()
    column = column_T.double().numpy()
    return [float(np.sum(column[a:b])) for a, b in zip(ends, ends[1:], strict=False)]


def slopes(formula: Formula, logp: Sums, *rest) -> np.ndarray:
    found, step = [], 1e-5
    for i in range(len(logp)):
        sides = [[*logp[:i], logp[i] + d, *logp[i + 1 :]] for d in (step, -step)]
        found.append((formula(sides[0], *rest) - formula(sides[1], *rest)) / (2 * step))
    return np.array(found)


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_paper(case: str) -> None:
    config, formula = CASES[case]
    algorithm = make_algorithm(config)
    for seed in range(NUM_BATCHES):
        num = 2 + seed % 5
        batch = feedback_batch(config.needs.feedback, num, seed)
        if case == "kto":
            gap = np.subtract(*(sums(c, batch) for c in (batch.old_logp_T, batch.reference_logp_T)))
            kto.z0 = max(0.0, float(np.mean(gap[num:])))
        filled = algorithm.advantages(batch)
        given = (
            sums(filled.old_logp_T, filled),
            sums(filled.reference_logp_T, filled),
            filled.response_lengths_B.tolist(),
        )
        assert feedback_metrics(filled)["policy/loss"] == pytest.approx(
            formula(*given), rel=VALUE, abs=VALUE
        )
        micro = micro_batch(filled, range(filled.num_samples), 1, 1)
        logp_S = micro.old_logp_S.clone().requires_grad_()
        denominator = algorithm.denominator(filled)
        output = algorithm.loss(logp_S, torch.zeros_like(logp_S), micro, denominator)
        assert output.loss == 0
        output.loss.backward()
        found_T = unpack([micro], [logp_S.grad], filled)
        expected_B = torch.tensor(slopes(formula, *given))
        expected_T = expected_B[filled.sample_index_T] * filled.response_mask_T
        torch.testing.assert_close(found_T.double(), expected_T, rtol=SLOPE, atol=SLOPE)


def test_metrics_are_of_the_implicit_reward() -> None:
    batch = feedback_batch("pairs", 4, 1)
    filled = make_algorithm(DpoConfig()).advantages(batch)
    reward = filled.reward_parts[IMPLICIT].numpy()
    metrics = feedback_metrics(filled)
    assert metrics["preference/accuracy"] == np.mean(reward[:4] > reward[4:])
    assert metrics["preference/chosen_reward"] == pytest.approx(reward[:4].mean(), rel=1e-6)
    assert metrics["preference/rejected_reward"] == pytest.approx(reward[4:].mean(), rel=1e-6)
    assert metrics["preference/margin"] == pytest.approx(reward[:4].mean() - reward[4:].mean())
    start = replace(batch, old_logp_T=batch.reference_logp_T)
    metrics = feedback_metrics(make_algorithm(DpoConfig()).advantages(start))
    assert metrics["preference/accuracy"] == 0.5
    assert metrics["policy/loss"] == pytest.approx(np.log(2))


def test_what_is_not_pairs_is_refused() -> None:
    batch = feedback_batch("pairs", 2, 0)
    for rewards in ([1.0, 1.0, 1.0, 0.0], [0.0] * 4):
        wrong = replace(batch, reward_B=torch.tensor(rewards))
        with pytest.raises(BatchError, match="one better and one worse sample in each group"):
            make_algorithm(DpoConfig()).advantages(wrong)
    with pytest.raises(BatchError, match="one better and one worse sample in each group"):
        make_algorithm(DpoConfig()).advantages(
            replace(batch, group_B=torch.zeros(4, dtype=torch.int64))
        )
