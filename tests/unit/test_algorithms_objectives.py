"""Per-token objectives against the papers' formulas, and their gradients."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.grpo import Grpo
from hybridrl.algorithms.log_ratio import importance_ratio, kl_estimate
from hybridrl.algorithms.policy_gradient import clipped_surrogate, soft_gated
from hybridrl.algorithms.ppo import clipped_value_loss
from hybridrl.config.schema import GrpoConfig
from hybridrl.contracts.batch import MicroBatch

LOGP = st.floats(-6, 0)
NUMBER = st.floats(-3, 3)


def value_and_slope(function, values, dtype=torch.float32):
    x = torch.tensor(values, dtype=dtype, requires_grad=True)
    found = function(x)
    (slope,) = torch.autograd.grad(found.sum(), x)
    return found.detach(), slope


def test_importance_ratio_is_exp_bit_by_bit_within_its_bounds_and_constant_beyond():
    # Without the bounds themselves, where torch 2.13's clamp has a slope and 2.15's has none.
    inside = torch.linspace(-19.99, 19.99, 4001).tolist()
    for mine, theirs in zip(
        value_and_slope(importance_ratio, inside), value_and_slope(torch.exp, inside), strict=True
    ):
        assert torch.equal(mine, theirs)
    ends = value_and_slope(torch.exp, [-20.0, -20.0, 20.0, 20.0, 20.0])[0]
    found, slope = value_and_slope(importance_ratio, [-1000.0, -20.5, 20.5, 90.0, 1000.0])
    assert torch.equal(found, ends) and not slope.any()
    assert importance_ratio(torch.tensor(math.nan)).isnan()  # what is broken stays so


def test_k3_is_its_definition_bit_by_bit_up_to_10_nats_and_constant_beyond():
    def k3(logp):
        return kl_estimate(logp, torch.zeros(()), "k3")

    def unbounded(logp):
        return (-logp).exp() - 1 + logp

    inside = torch.linspace(-2.6, 10.9, 1001).tolist()
    for mine, theirs in zip(
        value_and_slope(k3, inside), value_and_slope(unbounded, inside), strict=True
    ):
        assert torch.equal(mine, theirs)
    found, slope = value_and_slope(k3, [-1000.0, -90.0, -2.7, 11.1, 90.0, 1000.0])
    assert (found == 10).all() and not slope.any()
    assert kl_estimate(torch.tensor(math.nan), torch.zeros(()), "k3").isnan()


@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_a_ratio_beyond_float32_leaves_the_gradients_of_other_tokens_as_they_are(advantage):
    """exp(90) is infinite, and 0 times that, where clipping takes the gradient, not a number."""
    advantages = torch.tensor([advantage, 1.0, advantage])
    for objective in (
        lambda x: clipped_surrogate(x, advantages, 0.2, 0.2)[0],
        lambda x: clipped_surrogate(x, advantages, 0.2, 0.2, 3.0)[0],
        lambda x: soft_gated(x, advantages, 1.0, 1.05),
    ):
        found, slope = value_and_slope(objective, [90.0, 0.1, -90.0])
        assert found.isfinite().all() and slope[1] > 0
        assert slope[0] == slope[2] == 0


@given(LOGP, LOGP, NUMBER, st.floats(0.05, 0.5), st.floats(0.05, 0.5))
def test_clipped_surrogate_is_equation_7(logp, old, advantage, low, high):
    ratio = math.exp(logp - old)
    bounded = min(max(ratio, 1 - low), 1 + high)
    found, clipped = clipped_surrogate(
        *(torch.tensor([x], dtype=torch.float64) for x in (logp - old, advantage)), low, high
    )
    assert found.item() == pytest.approx(min(ratio * advantage, bounded * advantage), abs=1e-12)
    assert clipped.item() == (bounded * advantage < ratio * advantage)


@given(LOGP, LOGP, NUMBER)
def test_dual_clip_bounds_the_loss_of_a_bad_token(logp, old, advantage):
    """Ye et al. 2020: max(min(r A, clip(r) A), c A) where A < 0, else as without."""
    ratio = math.exp(logp - old)
    expected = min(ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage)
    if advantage < 0:
        expected = max(expected, 3 * advantage)
    log_ratio = torch.tensor([logp - old], dtype=torch.float64, requires_grad=True)
    given_advantage = torch.tensor([advantage], dtype=torch.float64)
    found, clipped = clipped_surrogate(log_ratio, given_advantage, 0.2, 0.2, 3.0)
    assert found.item() == pytest.approx(expected, abs=1e-12)
    found.sum().backward()
    assert log_ratio.grad.item() == pytest.approx(0 if clipped else ratio * advantage, abs=1e-9)


@given(NUMBER, NUMBER, NUMBER, st.floats(0.05, 1))
def test_clipped_value_loss_is_the_worse_of_two_squares(value, old, target, clip):
    near = old + min(max(value - old, -clip), clip)
    expected = max((value - target) ** 2, (near - target) ** 2) / 2
    found, clipped = clipped_value_loss(
        *(torch.tensor([x], dtype=torch.float64) for x in (value, old, target)), clip
    )
    assert found.item() == pytest.approx(expected, abs=1e-12)
    assert clipped.item() == ((near - target) ** 2 > (value - target) ** 2)


@given(LOGP, LOGP)
def test_kl_estimates_are_their_definitions(logp, other):
    r = math.exp(other - logp)
    expected = {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}
    expected["k3"] = min(expected["k3"], 10)
    for estimator, value in expected.items():
        found = kl_estimate(
            torch.tensor(logp, dtype=torch.float64),
            torch.tensor(other, dtype=torch.float64),
            estimator,
        )
        assert found.item() == pytest.approx(value, rel=1e-9, abs=1e-12)


def micro_of(mask: list[bool], **columns: list[float] | None) -> MicroBatch:
    """A micro-batch of one sequence with these columns."""
    size = len(mask)
    return MicroBatch(
        tokens_S=torch.zeros(size, dtype=torch.int64),
        positions_S=torch.arange(size),
        targets_S=torch.zeros(size, dtype=torch.int64),
        loss_mask_S=torch.tensor(mask),
        sequence_index_S=torch.zeros(size, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, size], dtype=torch.int32),
        max_seqlen=size,
        sample_indices=(0,),
        **{
            n: None if c is None else torch.tensor(c, dtype=torch.float64)
            for n, c in columns.items()
        },
    )


@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("has_reference", [True, False])
def test_policy_loss_and_its_metrics_agree_with_a_loop(has_old, has_reference):
    rng = np.random.default_rng(3)
    size, denominator = 40, 13.0
    logp = -rng.random(size) * 3
    mask = rng.random(size) < 0.6
    old = np.where(mask, logp + rng.normal(size=size) * 0.4, 0)
    reference = np.where(mask, logp + rng.normal(size=size) * 0.4, 0)
    advantages = np.where(mask, rng.normal(size=size), 0)
    entropy = rng.random(size)
    config = GrpoConfig(
        clip_low=0.1,
        clip_high=0.3,
        kl_coef=0.7 if has_reference else 0.0,
        kl_estimator="k2",
        entropy_coef=0.05,
    )
    found = make_algorithm(config).loss(
        torch.from_numpy(logp),
        torch.from_numpy(entropy),
        micro_of(
            mask.tolist(),
            old_logp_S=old.tolist() if has_old else None,
            reference_logp_S=reference.tolist() if has_reference else None,
            advantages_S=advantages.tolist(),
        ),
        denominator,
    )
    total = clipped = kl = entropies = 0.0
    for t in np.flatnonzero(mask):
        start = old[t] if has_old else logp[t]
        ratio = math.exp(logp[t] - start)
        plain = ratio * advantages[t]
        bounded = min(max(ratio, 0.9), 1.3) * advantages[t]
        total -= min(plain, bounded)
        total -= 0.05 * entropy[t]
        if has_reference:
            total += 0.7 * (reference[t] - logp[t]) ** 2 / 2
            kl += math.exp(reference[t] - logp[t]) - 1 - (reference[t] - logp[t])
        else:
            kl += math.exp(logp[t] - start) - 1 - (logp[t] - start)
        clipped += bounded < plain
        entropies += entropy[t]
    assert clipped > 0 or not has_old
    # The micro-batch's columns went through lists of float64: nothing is rounded but sums.
    assert found.loss.item() == pytest.approx(total / denominator, rel=1e-12)
    assert {n: float(v) for n, v in found.metrics.items()} == pytest.approx(
        {
            "policy/clip_fraction": clipped,
            "policy/entropy": entropies,
            "policy/kl": kl,
        },
        rel=1e-12,
        abs=1e-12,
    )


@pytest.mark.parametrize(
    ("estimator", "is_weighted", "is_exact"),
    [
        ("k1", False, False),  # zero on average
        ("k2", False, True),
        ("k3", False, False),  # that of the KL the other way round
        ("k1", True, True),
        ("k3", True, True),
    ],
)
def test_the_gradient_of_a_kl_loss_is_that_of_the_kl_or_known_not_to_be(
    estimator, is_weighted, is_exact
):
    """On average over all tokens of a vocabulary of six, each as often as the policy draws it."""
    logits = torch.randn(
        6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    ).requires_grad_()
    q = torch.randn(6, dtype=torch.float64).log_softmax(0)
    exact = (logits.softmax(0) * (logits.log_softmax(0) - q)).sum()
    (expected,) = torch.autograd.grad(exact, logits)
    logp = logits.log_softmax(0)
    algorithm = make_algorithm(
        GrpoConfig(kl_coef=1.0, kl_estimator=estimator, kl_importance_weighted=is_weighted)
    )
    micro = micro_of(
        [True] * 6, reference_logp_S=q.tolist(), old_logp_S=logp.tolist(), advantages_S=[0.0] * 6
    )
    # Token by token, for the loss is a sum and each counts with its probability.
    slopes = torch.autograd.grad(algorithm.loss(logp, logp * 0, micro, 1.0).loss, logp)[0]
    (found,) = torch.autograd.grad((logp * (slopes * logp.exp()).detach()).sum(), logits)
    assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12) == is_exact
    if (estimator, is_weighted) == ("k1", False):
        assert found.abs().max() < 1e-12


def test_centering_subtracts_the_engines_mean_score_from_each_tokens_gradient() -> None:
    """Of whole distributions: A (grad log p_t - sum_v q_v grad log p_v), over response tokens."""
    algorithm = Grpo(GrpoConfig(score_centering=True))
    advantages, mask, target_S = [0.0, 1.5, -2.0], [False, True, True], torch.tensor([0, 3, 1])
    logits_SV = torch.randn(3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q_SV = (logits_SV + torch.tensor([0.3, -0.2, 0.0, 0.5, -0.6])).softmax(-1)
    logits_SV.requires_grad_()
    logp_SV = logits_SV.log_softmax(-1)
    one = micro_of(mask, advantages_S=advantages)
    logp_S = logp_SV.gather(1, target_S[:, None])[:, 0]
    loss = algorithm.loss(logp_S, torch.zeros(3, dtype=torch.float64), one, 4.0).loss
    (loss + algorithm.centering_loss(logp_SV, q_SV.log(), one, 4.0)).backward()
    drawn_SV = torch.nn.functional.one_hot(target_S, 5).double()
    expected_SV = -torch.tensor(advantages, dtype=torch.float64)[:, None] * (drawn_SV - q_SV) / 4
    torch.testing.assert_close(logits_SV.grad, expected_SV, rtol=0, atol=1e-12)
