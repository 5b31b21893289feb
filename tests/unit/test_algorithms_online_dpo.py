"""Online DPO against loops over Python's own floats: which samples make the pairs, the loss of
arXiv 2402.04792's algorithm 1 on them, and its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from batches import train_batch

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.base import GroupAlgorithm, SelectiveAlgorithm
from hybridrl.algorithms.preference import IMPLICIT, feedback_metrics
from hybridrl.config.schema import OnlineDpoConfig
from hybridrl.contracts.batch import TrainBatch
from hybridrl.training.batches.collation import micro_batch, unpack

NUM_BATCHES = 40
EXACT = 1e-6  # float32 columns beside float64 loops

# Of a pair: (chosen's, rejected's) log-probabilities, those of the reference, lengths.
Sides = tuple[float, float]
PairLoss = Callable[[Sides, Sides, Sides], float]


def sigmoid_loss(logp: Sides, reference: Sides, lengths: Sides) -> float:
    h = (logp[0] - reference[0]) - (logp[1] - reference[1])
    return math.log1p(math.exp(-0.1 * h))


def ipo_loss(logp: Sides, reference: Sides, lengths: Sides) -> float:
    s = [(y - r) / n for y, r, n in zip(logp, reference, lengths, strict=True)]
    return (s[0] - s[1] - 1 / (2 * 0.1)) ** 2


def norm_sft_loss(logp: Sides, reference: Sides, lengths: Sides) -> float:
    s = [(y - r) / n for y, r, n in zip(logp, reference, lengths, strict=True)]
    return math.log1p(math.exp(-5.0 * (s[0] - s[1]))) - 0.3 * logp[0] / lengths[0]


CASES: dict[str, tuple[OnlineDpoConfig, PairLoss]] = {
    "sigmoid": (OnlineDpoConfig(), sigmoid_loss),
    "ipo": (OnlineDpoConfig(loss="squared", length_normalized=True), ipo_loss),
    "norm": (OnlineDpoConfig(length_normalized=True, beta=5.0, sft_coef=0.3), norm_sft_loss),
}


def a_batch(seed: int) -> TrainBatch:
    """Groups of unequal sizes, in any order; rewards have ties, some groups have one reward."""
    generator = torch.Generator().manual_seed(seed)
    num_prompts, num_samples = 3 + seed % 4, 2 + seed % 3
    batch = train_batch(num_prompts, num_samples, seed)
    rewards = torch.randint(0, 3, (batch.num_samples,), generator=generator).float()
    order = torch.randperm(batch.num_samples, generator=generator)
    batch = replace(batch, reward_B=rewards).select(order[: batch.num_samples - seed % 2])
    # Log-probabilities of the size of a model's, all below 0.
    columns = {
        name: -torch.rand(batch.num_tokens, generator=generator) * batch.response_mask_T
        for name in ("old_logp_T", "reference_logp_T")
    }
    return replace(batch, **columns, advantages_T=None)


def pairs_of(batch: TrainBatch) -> list[tuple[int, int]]:
    """The better and the worse sample of each group with two rewards; of ties the lowest number."""
    found = []
    for group in sorted(set(batch.group_B.tolist())):
        rows = [i for i, g in enumerate(batch.group_B.tolist()) if g == group]
        rows.sort(key=lambda i: int(batch.sample_ids_B[i]))
        rewards = [float(batch.reward_B[i]) for i in rows]
        if max(rewards) > min(rewards):
            found.append(
                (rows[rewards.index(max(rewards))], rows[rewards.index(min(rewards))]),
            )
    return found


def sums(column_T: torch.Tensor, batch: TrainBatch) -> list[float]:
    ends, column = batch.offsets.tolist(), column_T.double().tolist()
    return [math.fsum(column[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


def mean_loss(pair: PairLoss, chosen: list[tuple[int, int]], logp: list[float], *rest) -> float:
    reference, lengths = rest
    values = [
        pair((logp[c], logp[r]), (reference[c], reference[r]), (lengths[c], lengths[r]))
        for c, r in chosen
    ]
    return math.fsum(values) / len(values)


@pytest.mark.parametrize("case", CASES)
def test_pairs_loss_and_gradient_are_those_of_plain_loops(case: str) -> None:
    config, pair = CASES[case]
    algorithm = make_algorithm(config)
    assert isinstance(algorithm, SelectiveAlgorithm) and isinstance(algorithm, GroupAlgorithm)
    num_without = 0
    for seed in range(NUM_BATCHES):
        batch = a_batch(seed)
        chosen = pairs_of(batch)
        if not chosen:
            num_without += 1
            continue
        rows = sorted(i for sides in chosen for i in sides)
        assert algorithm.selected(batch).tolist() == rows
        filled = algorithm.advantages(batch)
        assert filled.sample_ids_B.tolist() == [int(batch.sample_ids_B[i]) for i in rows]
        assert torch.equal(filled.reward_B, batch.reward_B[rows]), "rewards stay what they are"
        assert algorithm.denominator(filled) == len(chosen)

        given = (sums(batch.reference_logp_T, batch), batch.response_lengths_B.tolist())
        logp = sums(batch.old_logp_T, batch)
        metrics = feedback_metrics(filled)
        expected = mean_loss(pair, chosen, logp, *given)
        assert metrics["policy/loss"] == pytest.approx(expected, rel=EXACT, abs=EXACT)
        implicit = dict(zip(rows, filled.reward_parts[IMPLICIT].tolist(), strict=True))
        accuracy = [
            0.5 * ((implicit[c] > implicit[r]) + (implicit[c] >= implicit[r])) for c, r in chosen
        ]
        assert metrics["preference/accuracy"] == pytest.approx(math.fsum(accuracy) / len(accuracy))

        micro = micro_batch(filled, range(filled.num_samples), 1, 1)
        logp_S = micro.old_logp_S.clone().requires_grad_()
        zeros_S = torch.zeros_like(logp_S)
        algorithm.loss(logp_S, zeros_S, micro, algorithm.denominator(filled)).loss.backward()
        found_T = unpack([micro], [logp_S.grad], filled)
        step = 1e-5
        for row, i in enumerate(rows):
            sides = [[*logp[:i], logp[i] + d, *logp[i + 1 :]] for d in (step, -step)]
            ahead, behind = (mean_loss(pair, chosen, side, *given) for side in sides)
            start, end = filled.offsets[row : row + 2].tolist()
            tokens = found_T[start:end][filled.response_mask_T[start:end]].tolist()
            for found in tokens:
                slope = (ahead - behind) / (2 * step)
                assert found == pytest.approx(slope, rel=EXACT, abs=EXACT)
    assert num_without < NUM_BATCHES / 4


def test_groups_without_a_pair_are_uninformative_and_left_out() -> None:
    batch = train_batch(num_prompts=3, samples_per_prompt=3)
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 2.0, 0.0, 0.5, 0.5, 0.5])
    batch = replace(batch, reward_B=rewards)
    algorithm = make_algorithm(OnlineDpoConfig(max_resampling=2))
    assert algorithm.max_resampling == 2
    assert algorithm.uninformative(batch).tolist() == [True] * 3 + [False] * 3 + [True] * 3
    assert algorithm.selected(batch).tolist() == [3, 4]
    # One sample of a group, the others having been dropped, is compared with nothing.
    assert algorithm.selected(batch.select([0, 3, 4, 7])).tolist() == [1, 2]


def test_a_step_without_any_pair_teaches_nothing() -> None:
    batch = replace(train_batch(), reward_B=torch.zeros(6))
    algorithm = make_algorithm(OnlineDpoConfig())
    filled = algorithm.advantages(batch)
    assert filled.num_samples == 1
    assert not filled.advantages_T.any() and feedback_metrics(filled) == {}
    micro = micro_batch(filled, [0], 1, 1)
    logp_S = micro.old_logp_S.clone().requires_grad_()
    output = algorithm.loss(logp_S, torch.zeros_like(logp_S), micro, algorithm.denominator(filled))
    output.loss.backward()
    assert output.loss == 0 and not logp_S.grad.any()
