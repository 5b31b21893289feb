"""Off-policy correction and its metrics against float64 loops from their definitions."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from batches import train_batch
from test_algorithms_advantage import responses

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.correction import off_policy_metrics
from hybridrl.config.correction import CorrectionConfig
from hybridrl.config.schema import GrpoConfig
from hybridrl.contracts.batch import TrainBatch
from hybridrl.training.batches.collation import micro_batch

NUM_BATCHES = 40
EXACT = 1e-6  # float32 columns are exact on both sides; sums of float64 in another order


def batch_of(seed: int) -> TrainBatch:
    """The behaviour policy is near the old one."""
    batch = train_batch(3, 4, seed)
    noise_T = 0.3 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed))
    behaviour_T = (batch.old_logp_T + noise_T) * batch.response_mask_T
    return replace(batch, behaviour_logp_T=behaviour_T)


@pytest.fixture(scope="module")
def batches() -> list[TrainBatch]:
    """With advantages, and in `values_T` the log-probabilities of a policy that has moved."""
    found = []
    for seed in range(NUM_BATCHES):
        batch = batch_of(seed)
        filled = make_algorithm(GrpoConfig()).advantages(batch)
        found.append(replace(filled, values_T=now_of(batch, seed)))
    return found


@cache
def ratios(batch: TrainBatch, level: str) -> list[np.ndarray]:
    """k of every token, response by response."""
    found = []
    columns = (batch.old_logp_T, batch.behaviour_logp_T)
    for old, engine in zip(*(responses(batch, c) for c in columns), strict=True):
        each = [math.exp(o - e) for o, e in zip(old, engine, strict=True)]
        if level != "token":
            product = math.prod(each)
            each = [product if level == "sequence" else product ** (1 / len(each))] * len(each)
        found.append(np.array(each))
    return found


def weight_of(k: float, config: CorrectionConfig) -> float:
    if config.bound == "truncate":
        return min(max(k, config.min), config.max)
    return k if config.min <= k <= config.max else 0.0


def expected_weights(batch: TrainBatch, config: CorrectionConfig) -> np.ndarray:
    found = [np.ones(len(row)) for row in ratios(batch, "token")]
    if config.weight != "none":
        found = [
            np.array([weight_of(k, config) for k in row]) for row in ratios(batch, config.weight)
        ]  # by value, for the rows are shared
    if config.reject != "none":
        high = config.reject_max or (1.001 if config.reject == "geometric" else 2.0)
        low = 1 / high if config.reject_min is None else config.reject_min
        for row, k in zip(found, ratios(batch, config.reject), strict=True):
            row[(k < low) | (k > high)] = 0.0
    return np.concatenate(found)


CASES = [
    CorrectionConfig(weight=level, bound=bound, max=1.3, min=low)
    for level, bound, low in itertools.product(
        ("token", "sequence", "geometric"), ("truncate", "mask"), (0.0, 0.8)
    )
] + [
    CorrectionConfig(reject="token", reject_max=1.2),
    CorrectionConfig(reject="sequence", reject_min=0.0, reject_max=1.2),
    CorrectionConfig(reject="geometric", reject_max=1.05),
    CorrectionConfig(weight="token", reject="sequence"),
    CorrectionConfig(weight="sequence", bound="mask", reject="geometric", reject_max=1.1),
]


def name_of(config: CorrectionConfig) -> str:
    return "-".join(f"{v}" for v in config.model_dump(exclude_defaults=True).values())


def loss_of(batch: TrainBatch, config: GrpoConfig) -> tuple[float, np.ndarray]:
    """Loss and gradient of the policy that has moved."""
    algorithm = make_algorithm(config)
    micro = micro_batch(batch, range(batch.num_samples), 1, 4)
    logp_S = micro.values_S.double().requires_grad_()
    names = ("old_logp_S", "advantages_S", "behaviour_logp_S")
    micro = replace(micro, **{n: getattr(micro, n).double() for n in names})
    denominator = algorithm.denominator(batch)
    loss = algorithm.loss(logp_S, torch.zeros_like(logp_S), micro, denominator).loss
    loss.backward()
    return loss.item(), logp_S.grad[micro.loss_mask_S].numpy()


def now_of(batch: TrainBatch, seed: int) -> torch.Tensor:
    noise_T = torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(seed + 1)) * 0.3
    return (batch.old_logp_T + noise_T) * batch.response_mask_T


@pytest.mark.parametrize("config", CASES, ids=name_of)
def test_the_objective_is_weighted_between_behaviour_and_old_and_clipped_between_old_and_current(
    config: CorrectionConfig, batches: list[TrainBatch]
) -> None:
    """Decoupled PPO: w min(r A, clip(r) A) with w by old / behaviour, r = current / old."""
    num_changed = 0
    for batch in batches:
        weight = expected_weights(batch, config)
        columns = (batch.values_T, batch.old_logp_T, batch.advantages_T)
        now, old, a = (np.concatenate(responses(batch, column)) for column in columns)
        total, slopes = 0.0, []
        for w, x, y, z in zip(weight, now, old, a, strict=True):
            r = math.exp(x - y)
            bounded = min(max(r, 0.8), 1.2)
            total -= w * min(r * z, bounded * z) / len(weight)
            slopes.append(0.0 if bounded * z < r * z else -w * r * z / len(weight))
        found, gradient = loss_of(batch, GrpoConfig(correction=config))
        assert found == pytest.approx(total, rel=EXACT, abs=EXACT)
        np.testing.assert_allclose(gradient, slopes, rtol=EXACT, atol=EXACT)
        num_changed += int(((weight == 0) | (weight == config.max) | (weight == config.min)).any())
    assert num_changed > NUM_BATCHES / 4


def test_the_proximal_policy_may_be_the_behaviour_policy(batches: list[TrainBatch]) -> None:
    """Then PPO is that of its paper, with the engine's as the old policy."""
    config = GrpoConfig(correction=CorrectionConfig(proximal="behaviour"))
    for batch in batches:
        found = loss_of(batch, config)
        plain = replace(batch, old_logp_T=batch.behaviour_logp_T)
        expected = loss_of(plain, GrpoConfig())
        assert found[0] == expected[0] != loss_of(batch, GrpoConfig())[0]
        np.testing.assert_array_equal(found[1], expected[1])


def test_without_the_column_of_old_log_probabilities_the_weights_are_of_the_current_ones() -> None:
    config = GrpoConfig(correction=CorrectionConfig(weight="sequence", max=1.3))
    batch = batch_of(0)
    algorithm = make_algorithm(config)
    assert not algorithm.needs.old_logps, "no forward pass more"
    filled = algorithm.advantages(batch)
    with_old = micro_batch(filled, range(12), 1, 1)
    logp_S, entropy_S = with_old.old_logp_S, torch.zeros(with_old.num_positions)
    losses = [
        algorithm.loss(logp_S, entropy_S, micro, 1.0).loss
        for micro in (with_old, replace(with_old, old_logp_S=None))
    ]
    assert losses[0] == losses[1]


def test_metrics_are_their_definitions(batches: list[TrainBatch]) -> None:
    config = CorrectionConfig(weight="sequence", max=1.5, reject="token", reject_max=1.3)
    for batch in batches:
        old, engine = (responses(batch, c) for c in (batch.old_logp_T, batch.behaviour_logp_T))
        log_ppl = np.array([[-e.mean(), -o.mean()] for e, o in zip(engine, old, strict=True)])
        token = np.concatenate(ratios(batch, "token"))
        product = np.array([row[0] for row in ratios(batch, "sequence")])
        k = np.concatenate(ratios(batch, "sequence"))
        lost = [(row < 1 / 1.3) | (row > 1.3) for row in ratios(batch, "token")]
        gap = log_ppl[:, 1] - log_ppl[:, 0]  # above 0 where the trainer is the less confident
        expected = {
            "mismatch/rollout_ppl": np.exp(log_ppl[:, 0]).mean(),
            "mismatch/training_ppl": np.exp(log_ppl[:, 1]).mean(),
            "mismatch/rollout_log_ppl": log_ppl[:, 0].mean(),
            "mismatch/training_log_ppl": log_ppl[:, 1].mean(),
            "mismatch/ppl_ratio": (np.exp(log_ppl[:, 1]) / np.exp(log_ppl[:, 0])).mean(),
            "mismatch/log_ppl_diff": gap.mean(),
            "mismatch/log_ppl_abs_diff": abs(gap).mean(),
            "mismatch/log_ppl_diff_max": gap.max(),
            "mismatch/log_ppl_diff_min": gap.min(),
            "mismatch/kl_k1": (np.concatenate(engine) - np.concatenate(old)).mean(),
            "mismatch/chi2_token": (token**2).mean() - 1,
            "mismatch/chi2_sequence": (product**2).mean() - 1,
            "correction/effective_sample_size": k.sum() ** 2 / (len(k) * (k**2).sum()),
            "correction/rejected_tokens": np.concatenate(lost).mean(),
            "correction/rejected_sequences": np.mean([row.any() for row in lost]),
        }
        for name, values, ddof in (("weight", k, 0), ("sequence_weight", product, 1)):
            expected |= {
                f"correction/{name}_mean": values.mean(),
                f"correction/{name}_std": values.std(ddof=ddof),
                f"correction/{name}_min": values.min(),
                f"correction/{name}_max": values.max(),
                f"correction/{name}_max_deviation": abs(values - 1).max(),
                f"correction/{name}_fraction_high": (values > 1.5).mean(),
                f"correction/{name}_fraction_low": (values < 1 / 1.5).mean(),
            }
        found = off_policy_metrics(batch, batch.old_logp_T, config)
        assert found == pytest.approx(expected, rel=EXACT, abs=EXACT)
        always = off_policy_metrics(batch, batch.old_logp_T)
        assert always == {n: v for n, v in found.items() if n.startswith("mismatch/")}


@pytest.mark.parametrize("gap", [-1000.0, 1000.0])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_response_of_another_policy_does_not_overflow(gap: float, level: str) -> None:
    batch = batch_of(0)
    batch = replace(batch, old_logp_T=batch.old_logp_T - 1001 * batch.response_mask_T)
    behaviour_T = batch.old_logp_T + gap * batch.response_mask_T
    batch = replace(batch, behaviour_logp_T=behaviour_T)
    config = CorrectionConfig(weight=level, reject=level)
    found = off_policy_metrics(batch, batch.old_logp_T, config)
    perplexities = {"mismatch/rollout_ppl", "mismatch/training_ppl"}  # theirs are beyond float64
    assert all(math.isfinite(found[name]) for name in found.keys() - perplexities)
    config = GrpoConfig(correction=CorrectionConfig(weight=level))
    batch = make_algorithm(config).advantages(replace(batch, values_T=now_of(batch, 0)))
    loss, gradient = loss_of(batch, config)
    assert math.isfinite(loss) and np.isfinite(gradient).all()
