"""Tokens that an environment put into a response: who holds them, and who must not count them.

The references are loops over the tokens of one sample, or the same batch without its observations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import observed_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.advantage import gae, last_token_rewards
from hybridrl.algorithms.base import num_response_tokens
from hybridrl.algorithms.correction import off_policy_metrics
from hybridrl.config.algorithm import GrpoConfig, PpoConfig, ReinforceConfig
from hybridrl.config.correction import CorrectionConfig
from hybridrl.contracts.batch import BatchError, Producer, Prompt, Rollout, RolloutBatch, TrainBatch
from hybridrl.training.batches.collation import micro_batch, unpack
from hybridrl.training.mismatch import mismatch_metrics

HERE = Producer.here("test")
COLUMNS = ("old_logp_T", "reference_logp_T", "values_T", "advantages_T", "returns_T")
EXACT = 1e-12  # float64 sums in another order


def shortened(batch: TrainBatch) -> TrainBatch:
    """The batch without its observations."""
    kept = ~batch.observed_T
    columns = {n: c[kept] if n.endswith("_T") else c for n, c in batch.columns().items()}
    lengths_B = batch.prompt_lengths_B + batch.response_lengths_B
    return replace(batch, **{**columns, "lengths_B": lengths_B, "observed_T": None})


def test_a_batch_says_of_each_token_whether_it_was_sampled() -> None:
    batch = observed_batch(6, 3)
    assert 5 < int(batch.observed_T.sum()) < batch.num_tokens / 2
    for i, start in enumerate(batch.offsets[:-1].tolist()):
        first, end = start + int(batch.prompt_lengths_B[i]), start + int(batch.lengths_B[i])
        sampled = [t for t in range(first, end) if not batch.observed_T[t]]
        assert [t for t in range(start, end) if batch.response_mask_T[t]] == sampled
        assert int(batch.response_lengths_B[i]) == len(sampled)
    assert num_response_tokens(batch) == int(batch.response_mask_T.sum())


def test_selecting_splitting_and_joining_keep_the_mask_with_its_tokens() -> None:
    batch = observed_batch(4, 3)
    parts = [batch.select([i]) for i in range(12)]
    for part, i in zip(parts, range(12), strict=True):
        bounds = slice(int(batch.offsets[i]), int(batch.offsets[i + 1]))
        assert torch.equal(part.observed_T, batch.observed_T[bounds])
        assert torch.equal(part.response_mask_T, batch.response_mask_T[bounds])
    again = TrainBatch.concat([*parts[6:], *parts[:6]]).select([*range(6, 12), *range(6)])
    assert torch.equal(again.observed_T, batch.observed_T)
    assert torch.equal(again.response_lengths_B, batch.response_lengths_B)
    halves = TrainBatch.concat(batch.split(2))
    assert torch.equal(halves.response_mask_T, batch.response_mask_T)
    other = batch.join_columns(HERE, observed_T=torch.zeros_like(batch.observed_T))
    assert int(other.response_mask_T.sum()) > int(batch.response_mask_T.sum())


@pytest.mark.parametrize(
    ("observed", "said"),
    [
        ((False, True), "none that ends a response"),
        ((True, True), "none that ends a response"),
        ((True,), "2, one per token"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused(observed: tuple[bool, ...], said: str) -> None:
    rollout = Rollout(0, Prompt(0, "", (5,)), (6, 7), (0.0, 0.0), "stop", 0, observed)
    with pytest.raises(BatchError, match=said):
        RolloutBatch.from_rollouts([rollout], [0], HERE)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shares=st.booleans(),
    pads=st.sampled_from([(1, 1), (1, 4), (4, 8)]),
)
def test_micro_batches_have_a_loss_where_the_next_token_was_sampled(seed, shares, pads) -> None:
    batch = observed_batch(3, 3, seed)
    shares = shares and pads[0] == 1
    micro = micro_batch(batch, range(9), *pads, shares_prompts=shares)
    assert int(micro.loss_mask_S.sum()) == int(batch.response_mask_T.sum())
    where_R = micro.loss_mask_S.nonzero()[:, 0]
    sampled_T = batch.response_mask_T
    assert torch.equal(micro.targets_S[where_R], batch.tokens_T[sampled_T])
    for name in COLUMNS:
        column_S = getattr(micro, name.replace("_T", "_S"))
        assert torch.equal(column_S[where_R], batch.columns()[name][sampled_T])
        assert not column_S[~micro.loss_mask_S].any()
    # What comes back lies where it belongs, and is zero on what was not sampled.
    found_T = unpack([micro], [micro.old_logp_S + 7.0 * ~micro.loss_mask_S], batch)
    assert torch.equal(found_T, batch.old_logp_T)
    # All tokens are there to be read, observations too.
    if not shares:
        assert torch.equal(micro.tokens_S[micro.sequence_index_S >= 0], batch.tokens_T)


def test_advantages_flow_across_observations() -> None:
    batch = observed_batch(4, 3)
    mask_T, lengths_B = batch.response_mask_T, batch.response_lengths_B
    values_R = batch.values_T[mask_T]
    gamma, lam = 0.9, 0.7
    rewards_R = last_token_rewards(batch.reward_B, lengths_B)
    advantages_R, returns_R = gae(rewards_R, values_R, lengths_B, gamma, lam)
    expected = []
    for i in range(batch.num_samples):
        tokens = range(int(batch.offsets[i]), int(batch.offsets[i + 1]))
        steps = [t for t in tokens if mask_T[t]]  # an observation is part of a transition
        values = [float(batch.values_T[t]) for t in steps] + [0.0]
        rewards = [0.0] * (len(steps) - 1) + [float(batch.reward_B[i])]
        ahead, found = 0.0, []
        for k in reversed(range(len(steps))):
            ahead = rewards[k] + gamma * values[k + 1] - values[k] + gamma * lam * ahead
            found.append(ahead)
        expected += reversed(found)
    torch.testing.assert_close(
        advantages_R, torch.tensor(expected, dtype=torch.float64), rtol=EXACT, atol=EXACT
    )
    assert torch.equal(returns_R, advantages_R + values_R.double())


LENGTHS = {"overlong_max_tokens": 5, "overlong_buffer_tokens": 4}


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(**LENGTHS),
        ReinforceConfig(**LENGTHS),
        PpoConfig(**LENGTHS, gae_length_alpha=0.5),
    ],
    ids=lambda config: config.name,
)
def test_what_depends_on_length_looks_at_sampled_tokens_alone(config: Any) -> None:
    batch, algorithm = observed_batch(4, 3), make_algorithm(config)
    rewards = []
    for i, start in enumerate(batch.offsets[:-1].tolist()):
        tokens = range(start + int(batch.prompt_lengths_B[i]), int(batch.offsets[i + 1]))
        length = sum(not batch.observed_T[t] for t in tokens)
        rewards.append(float(batch.reward_B[i]) - min(max((length - 1) / 4, 0), 1))
    assert algorithm.rewards(batch).tolist() == pytest.approx(rewards, rel=EXACT)
    paid = algorithm.rewards(batch) - batch.reward_B.double()
    assert 0 < int((paid == -1).sum()) < 12 > int((paid == 0).sum())
    found, short = algorithm.advantages(batch), algorithm.advantages(shortened(batch))
    sampled_T = found.advantages_T[batch.response_mask_T]
    assert torch.equal(sampled_T, short.advantages_T[short.response_mask_T])


def test_metrics_count_sampled_tokens_alone() -> None:
    batch = observed_batch(4, 3)
    short = shortened(batch)
    config = CorrectionConfig(weight="sequence", reject="geometric", reject_max=1.2)
    for whole, part in (
        (mismatch_metrics(batch, batch.old_logp_T), mismatch_metrics(short, short.old_logp_T)),
        (
            off_policy_metrics(batch, batch.old_logp_T, config),
            off_policy_metrics(short, short.old_logp_T, config),
        ),
    ):
        assert whole == pytest.approx(part, rel=EXACT)
