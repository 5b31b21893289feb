"""Advantages against float64 loops written from the papers' formulas."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batches import train_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.advantage import (
    divided_by_group_std,
    gae,
    last_token_rewards,
    minus_group_mean,
    overlong_penalty,
)
from hybridrl.config.schema import GrpoConfig, PpoConfig
from hybridrl.contracts.batch import TrainBatch

F32 = 1e-6  # columns are stored as float32; everything before that is float64


def responses(batch: TrainBatch, column_T: torch.Tensor) -> list[np.ndarray]:
    """The response part of each sample as float64, cut out with a loop of its own."""
    found, start = [], 0
    for prompt, total in zip(
        batch.prompt_lengths_B.tolist(), batch.lengths_B.tolist(), strict=True
    ):
        found.append(column_T[start + prompt : start + total].double().numpy())
        start += total
    return found


def gae_by_definition(rewards, values, gamma, lam):
    """Schulman et al. 2016, eq. 16: the sum over l itself, not the recursion."""
    n = len(rewards)
    delta = [
        rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)
    ]
    return np.array(
        [sum((gamma * lam) ** k * delta[t + k] for k in range(n - t)) for t in range(n)]
    )


def kl_by_definition(estimator, logp, reference):
    """Schulman 2020, with r = q / p, p sampled from."""
    r = np.exp(reference - logp)
    bounded = np.minimum((r - 1) - np.log(r), 10)
    return {"k1": -np.log(r), "k2": np.log(r) ** 2 / 2, "k3": bounded}[estimator]


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.3, 0.0]),
    seed=st.integers(0, 1000),
)
def test_gae_is_equation_16_on_each_sample_by_itself(lengths, gamma, lam, seed):
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=sum(lengths)), rng.normal(size=sum(lengths))
    found, returns = gae(
        torch.from_numpy(rewards), torch.from_numpy(values), torch.tensor(lengths), gamma, lam
    )
    start = 0
    for n in lengths:
        part = slice(start, start + n)
        expected = gae_by_definition(rewards[part], values[part], gamma, lam)
        np.testing.assert_allclose(found[part], expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(returns[part], expected + values[part], rtol=0, atol=1e-12)
        start += n


def test_gae_with_both_factors_one_is_the_reward_to_come_less_the_value():
    rewards = last_token_rewards(torch.tensor([3.0, -1.0]), torch.tensor([3, 2]))
    assert rewards.tolist() == [0, 0, 3, 0, -1]
    values = torch.tensor([0.5, 1.0, 2.0, 0.0, -3.0])
    advantages, returns = gae(rewards, values, torch.tensor([3, 2]), 1.0, 1.0)
    assert returns.tolist() == [3, 3, 3, -1, -1]
    assert advantages.tolist() == [2.5, 2.0, 1.0, -1.0, 2.0]


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 6), min_size=1, max_size=5),
    normalize_std=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_group_mean_and_deviation_are_those_of_the_group(sizes, normalize_std, seed):
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.repeat(np.arange(len(sizes)) * 7 + 3, sizes))
    reward = rng.normal(size=len(group)).astype(np.float32)
    found = minus_group_mean(torch.from_numpy(reward), torch.from_numpy(group))
    if normalize_std:
        found = divided_by_group_std(found, torch.from_numpy(group))
    for i in range(len(group)):
        own = reward[group == group[i]].astype(np.float64)
        expected = reward[i] - own.mean()
        if normalize_std:
            expected /= np.sqrt(((own - own.mean()) ** 2).sum() / (len(own) - 1)) + 1e-6
        assert found[i].item() == pytest.approx(expected, abs=1e-9)


def test_the_penalty_on_length_falls_linearly_over_the_buffer():
    found = overlong_penalty(torch.tensor([1, 6, 7, 8, 10, 11, 99]), longest=10, buffer=4)
    assert found.tolist() == [0, 0, -0.25, -0.5, -1, -1, -1]


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_ppo_advantages_agree_with_loops(kl_in, estimator, whitened):
    batch = train_batch(4, 2, seed=5)
    algorithm = make_algorithm(
        PpoConfig(
            gamma=0.9, gae_lambda=0.8, kl_coef=0.3, kl_in=kl_in, kl_estimator=estimator,
            whiten_advantages=whitened,
        )
    )  # fmt: skip
    filled = algorithm.advantages(batch)
    advantages, returns = [], []
    columns = (batch.values_T, batch.old_logp_T, batch.reference_logp_T)
    for i, (values, old, reference) in enumerate(
        zip(*(responses(batch, column) for column in columns), strict=True)
    ):
        rewards = np.zeros(len(values))
        if kl_in == "reward":
            rewards -= 0.3 * kl_by_definition(estimator, old, reference)
        rewards[-1] += batch.reward_B[i].item()
        advantages.append(gae_by_definition(rewards, values, 0.9, 0.8))
        returns.append(advantages[-1] + values)
    expected = np.concatenate(advantages)
    if whitened:
        expected = (expected - expected.mean()) / expected.std(ddof=1)
    found = np.concatenate(responses(batch, filled.advantages_T))
    np.testing.assert_allclose(found, expected, rtol=F32, atol=F32)
    found = np.concatenate(responses(batch, filled.returns_T))
    np.testing.assert_allclose(found, np.concatenate(returns), rtol=F32, atol=F32)


@pytest.mark.parametrize("normalize_std", [False, True])
@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_grpo_advantages_agree_with_loops(kl_in, normalize_std):
    batch = train_batch(3, 4, seed=6)
    algorithm = make_algorithm(
        GrpoConfig(kl_coef=0.2, kl_in=kl_in, kl_estimator="k2", normalize_std=normalize_std)
    )
    reward = batch.reward_B.double().numpy().copy()
    if kl_in == "reward":
        for i, (old, reference) in enumerate(
            zip(
                responses(batch, batch.old_logp_T),
                responses(batch, batch.reference_logp_T),
                strict=True,
            )
        ):
            reward[i] -= 0.2 * kl_by_definition("k2", old, reference).sum()
    filled = algorithm.advantages(batch)
    for i, found in enumerate(responses(batch, filled.advantages_T)):
        own = reward[4 * (i // 4) : 4 * (i // 4) + 4]
        expected = reward[i] - own.mean()
        if normalize_std:
            expected /= own.std(ddof=1) + 1e-6
        np.testing.assert_allclose(found, np.full(len(found), expected), rtol=F32, atol=F32)
    assert (filled.advantages_T[~batch.response_mask_T] == 0).all()


def test_the_algorithm_of_the_documentation_subtracts_the_groups_median() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "own.md").read_text()
    (code,) = re.findall(r"```python\n([^`]*class MedianGrpo.*?)```", page, re.DOTALL)
    made: dict[str, Any] = {}
    exec(code, made)
    batch = train_batch(num_prompts=2, samples_per_prompt=3)
    rewards = torch.tensor([0.0, 1.0, 5.0, 2.0, 2.0, 3.0], dtype=batch.reward_B.dtype)
    found = made["MedianGrpo"](clip_high=0.3).advantages(replace(batch, reward_B=rewards))
    told = [np.unique(of_sample) for of_sample in responses(batch, found.advantages_T)]
    np.testing.assert_allclose(np.concatenate(told), [-1, 0, 4, 0, 0, 1], atol=F32)
