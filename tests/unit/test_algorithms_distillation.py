"""Distillation against float64 loops written from its formulas: advantages, losses, gradients."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import train_batch
from test_algorithms_advantage import responses

from hybridrl.algorithms import make_algorithm
from hybridrl.config.algorithm import OnPolicyDistillationConfig
from hybridrl.config.distillation import DistillationConfig, GkdConfig
from hybridrl.config.load import load_config_dict
from hybridrl.contracts.batch import Producer, TrainBatch
from hybridrl.errors import ConfigError
from hybridrl.training.batches.collation import micro_batch

NUM_BATCHES = 40
F32 = 1e-6  # columns are stored as float32; everything before that is float64
# Probabilities out of float32 columns: their sum's complement is off by 1e-7 absolutely, and here
# never below 1e-3.
TAIL = 1e-4
VOCABULARY, TOP = 23, 6
SETTINGS = {
    "plain": {},
    "returns": {"gamma": 0.9},
    "reward": {"reward_coef": 0.7},
    "everything": {
        "gamma": 1.0, "reward_coef": 2.0, "kl_coef": 0.3, "kl_in": "reward", "kl_estimator": "k1",
        "overlong_max_tokens": 5, "overlong_buffer_tokens": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def batches() -> list[TrainBatch]:
    return [train_batch(3, 4, seed) for seed in range(NUM_BATCHES)]


def grouped(reward: np.ndarray) -> np.ndarray:
    """GRPO's, of groups of 4."""
    rows = reward.reshape(-1, 4)
    return ((rows - rows.mean(1)[:, None]) / (rows.std(1, ddof=1)[:, None] + 1e-6)).ravel()


def expected_advantages(batch: TrainBatch, settings: dict[str, object]) -> list[list[float]]:
    old, teacher, reference = (
        responses(batch, column)
        for column in (batch.old_logp_T, batch.teacher_logp_T, batch.reference_logp_T)
    )
    reward = batch.reward_B.double().numpy().copy()
    if settings.get("overlong_max_tokens"):
        for i, row in enumerate(old):
            reward[i] -= min(max((len(row) - 3) / 2, 0), 1)
    compared = grouped(reward)
    gamma, found = settings.get("gamma", 0.0), []
    for i in range(len(old)):
        earned = [t - o for t, o in zip(teacher[i], old[i], strict=True)]
        if settings.get("kl_coef"):
            earned = [
                e - 0.3 * (o - r) for e, o, r in zip(earned, old[i], reference[i], strict=True)
            ]
        row = [
            sum(gamma**k * earned[t + k] for k in range(len(earned) - t))
            for t in range(len(earned))
        ]
        found.append([a + settings.get("reward_coef", 0.0) * compared[i] for a in row])
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_a_sampled_token_earns_what_the_teacher_thinks_of_it(name, batches):
    settings = SETTINGS[name]
    algorithm = make_algorithm(OnPolicyDistillationConfig(teacher="t", **settings))
    for batch in batches:
        filled = algorithm.advantages(batch)
        for found, expected in zip(
            responses(batch, filled.advantages_T), expected_advantages(batch, settings), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=F32, atol=F32)
        assert (filled.advantages_T[~batch.response_mask_T] == 0).all()
        gaps = np.concatenate(responses(batch, batch.old_logp_T)) - np.concatenate(
            responses(batch, batch.teacher_logp_T)
        )
        said = algorithm.after_step(filled)["teacher/reverse_kl"]
        assert said == pytest.approx(gaps.mean(), rel=1e-9)


def test_a_teacher_that_is_the_policy_teaches_nothing_and_takes_no_reward(batches):
    algorithm = make_algorithm(OnPolicyDistillationConfig(teacher="t", gamma=0.5))
    for batch in batches[:10]:
        same = replace(batch, teacher_logp_T=batch.old_logp_T.clone(), reward_B=batch.reward_B * 9)
        assert (algorithm.advantages(same).advantages_T == 0).all()


def distributions(batch: TrainBatch, seed: int) -> tuple[TrainBatch, np.ndarray]:
    """The batch with the teacher's likeliest tokens of random distributions, and those (T, V)."""
    teacher = np.random.default_rng(seed).normal(size=(batch.num_tokens, VOCABULARY)) * 2
    logp = teacher - np.log(np.exp(teacher).sum(1, keepdims=True))
    top = np.argsort(-logp, 1)[:, :TOP]
    mask_T = batch.response_mask_T
    chosen = torch.from_numpy(np.take_along_axis(logp, top, 1)).float()
    columns = {
        "teacher_logp_TK": chosen * mask_T[:, None],
        "teacher_tokens_TK": torch.from_numpy(top).int() * mask_T[:, None],
    }
    return batch.join_columns(Producer.here("test"), **columns), logp


def kl_by_definition(teacher: np.ndarray, policy: np.ndarray, top: np.ndarray) -> float:
    """Both distributions with all tokens but `top` as one outcome."""
    total, rest_p, rest_q = 0.0, 0.0, 0.0
    for token in range(VOCABULARY):
        p, q = np.exp(teacher[token]), np.exp(policy[token])
        if token in top:
            total += p * np.log(p / q)
        else:
            rest_p, rest_q = rest_p + p, rest_q + q
    return total + rest_p * np.log(rest_p / rest_q)


@pytest.mark.parametrize("config", [DistillationConfig, GkdConfig])
def test_the_loss_is_the_kl_of_the_likeliest_tokens_and_the_rest(config, batches):
    algorithm = make_algorithm(config(teacher="t", top_k=TOP))
    for seed, plain in enumerate(batches):
        batch, teacher = distributions(plain, seed)
        micro = micro_batch(algorithm.advantages(batch), range(batch.num_samples), 1, 1)
        assert algorithm.denominator(batch) == int(batch.response_lengths_B.sum())
        rng = np.random.default_rng(seed + 1000)
        logits_SV = torch.from_numpy(rng.normal(size=(micro.num_positions, VOCABULARY)))
        logits_SV.requires_grad_()
        logp_SV = logits_SV.log_softmax(-1)
        logp_SK = logp_SV.gather(1, micro.teacher_tokens_SK.long())
        output = algorithm.loss(logp_SK, torch.zeros(micro.num_positions), micro, 7.0)
        output.loss.backward()
        # A loop of its own over samples: token t is predicted one position before it.
        total, mass = 0.0, 0.0
        slopes = np.zeros((micro.num_positions, VOCABULARY))
        policy = logp_SV.detach().numpy()
        start = 0
        for prompt, length in zip(
            batch.prompt_lengths_B.tolist(), batch.lengths_B.tolist(), strict=True
        ):
            for t in range(start + prompt, start + length):
                top = set(np.argsort(-teacher[t])[:TOP].tolist())
                total += kl_by_definition(teacher[t], policy[t - 1], top)
                mass += sum(np.exp(teacher[t][token]) for token in top)
                p, q = np.exp(teacher[t]), np.exp(policy[t - 1])
                rest_p = sum(p[i] for i in range(VOCABULARY) if i not in top)
                rest_q = sum(q[i] for i in range(VOCABULARY) if i not in top)
                for i in range(VOCABULARY):
                    slopes[t - 1, i] = q[i] - (p[i] if i in top else q[i] * rest_p / rest_q)
            start += length
        assert output.loss.item() == pytest.approx(total / 7, rel=TAIL, abs=TAIL)
        assert output.metrics["teacher/forward_kl"].item() == pytest.approx(total, rel=TAIL)
        assert output.metrics["teacher/top_mass"].item() == pytest.approx(mass, rel=F32)
        np.testing.assert_allclose(logits_SV.grad.numpy(), slopes / 7, rtol=TAIL, atol=F32)


def section(**algorithm: object) -> object:
    base = {"run": {"name": "a"}, "model": {"init": "m"}}
    return load_config_dict({**base, "algorithm": algorithm}).algorithm


def test_the_teacher_has_to_be_named_and_a_penalty_needs_a_reward():
    for name in ("on_policy_distillation", "distillation", "gkd"):
        assert section(name=name, teacher="t").teacher == "t"
        with pytest.raises(ConfigError, match=r"algorithm\.teacher is missing"):
            section(name=name)
    with pytest.raises(ConfigError, match="overlong_max_tokens: got 5000; allowed: no value"):
        section(name="on_policy_distillation", teacher="t", overlong_max_tokens=5000)
    with pytest.raises(ConfigError, match="Did you mean 'algorithm.top_k'"):
        section(name="gkd", teacher="t", topk=3)
