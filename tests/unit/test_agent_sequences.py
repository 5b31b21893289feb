"""Batches whose samples consist of several sequences."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.advantage import response_values, token_keys
from hybridrl.config.schema import GrpoConfig, RewardConfig
from hybridrl.contracts.batch import (
    BatchError,
    Producer,
    Prompt,
    Rollout,
    RolloutBatch,
    ScoredBatch,
    TrainBatch,
)
from hybridrl.generation.resampling import replace_uniform_groups
from hybridrl.generation.responses import (
    AgentResponse,
    AgentSequence,
    completion_from_json,
)
from hybridrl.generation.sample_tables import gathered_batch, table_of
from hybridrl.loop.evaluate import summarized
from hybridrl.rewards.base import Scorer
from hybridrl.training.batches.batch_plan import mini_batch_sizes
from hybridrl.training.batches.collation import micro_batch

HERE = Producer.here("test")
COUNTS = (1, 3, 2, 1, 2, 1)  # sequences of each sample
GROUPS = (0, 0, 0, 1, 1, 1)
REWARDS = (1.0, 0.0, 0.5, 0.0, 1.0, 1.0)


class OneRank:
    rank, size = 0, 1

    def gather_objects(self, value: object) -> list[object]:
        return [value]


def rollouts_of(sample: int, count: int, group: int) -> list[Rollout]:
    """Returns the sequences of a sample; all but the first also have observed tokens."""
    found = []
    for sequence in range(count):
        context = tuple(range(1, 3 + sequence + sample))
        num = 2 + (sample + sequence) % 3
        observed = tuple(sequence > 0 and i == 0 for i in range(num))
        found.append(
            Rollout(
                sample_id=sample,
                prompt=Prompt(group, f"prompt {group}", context, {"answer": "7"}),
                tokens=tuple(10 + sequence + i for i in range(num)),
                logps=tuple(0.0 if seen else -0.5 - i for i, seen in enumerate(observed)),
                finish_reason="length" if sequence == count - 1 and sample == 1 else "stop",
                version=3,
                observed=observed,
                sequence=sequence,
            )
        )
    return found


def batch_of() -> TrainBatch:
    rollouts, groups, rewards = [], [], []
    for sample, (count, group) in enumerate(zip(COUNTS, GROUPS, strict=True)):
        rollouts += rollouts_of(sample, count, group)
        groups += [group] * count
        rewards += [REWARDS[sample]] * count
    batch = RolloutBatch.from_rollouts(rollouts, groups, HERE)
    reward_B = torch.tensor(rewards)
    scored = batch.scored(reward_B, {"exact_match": reward_B}, HERE)
    columns = {"old_logp_T": scored.behaviour_logp_T, "reference_logp_T": scored.behaviour_logp_T}
    return scored.to_train(HERE, **columns)


def one_sequence_each(lengths: list[int]) -> TrainBatch:
    """Returns a batch with the same samples and rewards, each as one sequence."""
    rollouts = [
        Rollout(n, Prompt(g, "", (1,)), (5,) * length, (-1.0,) * length, "stop", 3)
        for n, (g, length) in enumerate(zip(GROUPS, lengths, strict=True))
    ]
    batch = RolloutBatch.from_rollouts(rollouts, GROUPS, HERE)
    reward_B = torch.tensor(REWARDS)
    scored = batch.scored(reward_B, {"exact_match": reward_B}, HERE)
    columns = {"old_logp_T": scored.behaviour_logp_T, "reference_logp_T": scored.behaviour_logp_T}
    return scored.to_train(HERE, **columns)


def algorithm_of(name: str, **changes: Any) -> Any:
    return make_algorithm(GrpoConfig(name=name, **changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {}),
        ("grpo", {"aggregate": "sequence_mean"}),
        ("rloo", {"fixed_length": 9}),
        ("opo", {"fixed_length": 9}),
        ("gdpo", {}),
        ("dapo", {"overlong_max_tokens": 8, "overlong_buffer_tokens": 6, "max_resampling": 0}),
    ],
)
def test_advantages_compare_samples_and_each_sample_counts_once(name, changes):
    batch, algorithm = batch_of(), algorithm_of(name, **changes)
    samples = batch.by_sample()
    plain = one_sequence_each(samples.response_lengths_B.tolist())
    found, expected = algorithm.advantages(batch), algorithm.advantages(plain)
    per_sample = expected.advantages_T[expected.offsets[1:] - 1]
    per_sequence = found.advantages_T[found.offsets[1:] - 1]
    assert torch.equal(per_sequence, per_sample.repeat_interleave(torch.tensor(COUNTS)))
    assert algorithm.denominator(found) == algorithm.denominator(expected)
    is_lost_B = algorithm.uninformative(batch)
    assert is_lost_B.shape == (len(batch.prompts),) and not is_lost_B.any()


def test_each_sampled_token_has_the_weight_of_its_sample_in_the_sequence_mean():
    algorithm = algorithm_of("grpo", aggregate="sequence_mean", kl_coef=0.0)
    batch = algorithm.advantages(batch_of())
    denominator, gradients = algorithm.denominator(batch), []
    assert denominator == len(COUNTS)
    # Two micro-batches divide the sequences of sample 1 (rows 1 to 3).
    for rows in (range(0, 2), range(2, batch.num_samples)):
        micro = micro_batch(batch, rows, 1, 1)
        logp_S = micro.old_logp_S.clone().requires_grad_()
        loss = algorithm.loss(logp_S, torch.zeros_like(logp_S), micro, denominator).loss
        loss.backward()
        for at, row in enumerate(rows):
            of_row = (micro.sequence_index_S == at) & micro.loss_mask_S
            gradients.append((row, logp_S.grad[of_row]))
    length_B = batch.sequences.of_sequences(batch.by_sample().response_lengths_B)
    for row, gradient in gradients:
        advantage = batch.advantages_T[batch.offsets[row + 1] - 1]
        expected = -advantage / length_B[row] / len(COUNTS)
        assert gradient.allclose(expected.expand_as(gradient), rtol=1e-6)
    assert sum(len(gradient) for _, gradient in gradients) == int(batch.response_lengths_B.sum())


def test_mini_batches_and_selections_keep_the_sequences_of_a_sample_together():
    batch = batch_of()
    sizes = mini_batch_sizes(batch, 3)
    assert sizes == [4, 3, 3]  # samples (0, 1), (2, 3) and (4, 5)
    parts, end = [], 0
    for size in sizes:
        parts.append(batch.select(range(end, end + size)))
        end += size
    assert [len(part.by_sample().sample_ids_B) for part in parts] == [2, 2, 2]
    assert TrainBatch.concat(parts).sequence_B.equal(batch.sequence_B)
    assert mini_batch_sizes(batch, 2) == [6, 4]  # not [5, 5], although there are 10 sequences
    assert mini_batch_sizes(one_sequence_each([1] * 6), 4) == [2, 2, 1, 1]


def test_gathering_sorts_samples_and_keeps_the_order_of_their_sequences():
    batch = batch_of()
    scored = ScoredBatch(**{n: getattr(batch, n) for n in ScoredBatch.__dataclass_fields__})
    moved = scored.select([7, 8, 4, 5, 0, 9, 1, 2, 3, 6])
    prompts = {g: Prompt(g, f"prompt {g}", (9, 9), {"answer": "7"}) for g in (0, 1)}
    table = table_of(moved)
    found = gathered_batch([table], moved, prompts, OneRank())
    assert found.sample_ids_B.equal(batch.sample_ids_B)
    assert found.sequence_B.equal(batch.sequence_B)
    assert found.tokens_T.equal(batch.tokens_T)
    assert found.prompts[0].tokens == (9, 9)  # the row's prompt, not the context of the sequence


def test_token_keys_differ_between_sequences():
    batch = batch_of()
    keys = token_keys(batch, torch.arange(int(batch.response_lengths_B.sum())))
    assert len(keys.unique()) == len(keys)


class Words:
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


def test_scorers_receive_the_last_sequence_and_all_sequences_get_the_reward():
    seen = []

    def length(prompt: str, response: str, columns: dict) -> float:
        seen.append(response)
        if response.endswith("14"):
            raise ValueError("cannot be scored")
        return float(len(seen))

    config = RewardConfig(on_error="drop")
    batch = batch_of()
    plain = RolloutBatch(**{n: getattr(batch, n) for n in RolloutBatch.__dataclass_fields__})
    scored = Scorer(config, Words(), length).score(plain)
    assert len(seen) == len(COUNTS)
    assert scored is not None
    # The last sequence of sample 4 ends with token 14, so both of its sequences are dropped.
    assert scored.sample_ids_B.tolist() == [0, 1, 1, 1, 2, 2, 3, 5]
    assert scored.reward_B.tolist() == [1, 2, 2, 2, 3, 3, 4, 6]


def test_evaluations_count_samples():
    config = RewardConfig()
    found = summarized(batch_of(), 2, config, samples_per_prompt=3)
    assert found.num_scored == len(COUNTS)
    assert found.reward == pytest.approx(sum(REWARDS) / len(REWARDS))
    assert found.accuracy == pytest.approx((1.5 / 3 + 2 / 3) / 2)


def test_resampling_replaces_all_sequences_of_a_group():
    batch = batch_of()
    scored = ScoredBatch(**{n: getattr(batch, n) for n in ScoredBatch.__dataclass_fields__})
    reward_B = scored.reward_B.where(scored.group_B == 1, 0.0)
    equal = replace(scored, reward_B=reward_B, reward_parts={"exact_match": reward_B})
    shifted = replace(
        scored, sample_ids_B=scored.sample_ids_B + 6, group_B=scored.group_B + 2
    ).select(range(6))
    algorithm = algorithm_of("dapo")
    found, metrics = replace_uniform_groups(
        algorithm, equal, lambda num: [None] * num, lambda prompts, first: shifted, 2
    )
    assert metrics["generate/resampled_groups"] == 1
    assert found.group_B.tolist() == [1] * 4 + [2] * 6
    assert found.sequence_B.tolist() == [0, 0, 1, 0, 0, 0, 1, 2, 0, 1]


def test_a_batch_refuses_sequence_numbers_for_only_some_samples():
    one, two = rollouts_of(0, 1, 0)[0], rollouts_of(1, 1, 0)[0]
    with pytest.raises(BatchError, match="sequence_B"):
        RolloutBatch.from_rollouts([one, replace(two, sequence=None)], [0, 0], HERE)


def test_agent_responses_survive_a_checkpoint_and_become_one_rollout_per_sequence():
    sequences = (
        AgentSequence((1, 2), (3, 4), (-0.5, -1.5), (False, False), "stop", ((2, 2),)),
        AgentSequence(
            (1,), (9, 8, 7), (0.0, -1.0, -2.0), (True, False, False), "stop", ((2, 2), (3, 1))
        ),
    )
    last = sequences[-1]
    done = AgentResponse(
        5, last.tokens, last.logps, "stop", 2, last.observed, 3, reward=1.0, sequences=sequences
    )
    again = completion_from_json(json.loads(json.dumps(asdict(done))))
    assert again == done and again.runs == ((2, 2), (2, 2), (3, 1))
    rollouts = done.rollouts(Prompt(0, "text", (1, 1, 1)))
    assert [one.prompt.tokens for one in rollouts] == [(1, 2), (1,)]
    assert [one.sequence for one in rollouts] == [0, 1]
    batch = RolloutBatch.from_rollouts(rollouts, [0, 0], HERE)
    assert response_values(batch.behaviour_logp_T, batch).tolist() == [-0.5, -1.5, -1.0, -2.0]
    assert batch.versions_T.tolist() == [0, 0, 2, 2, 0, 2, 2, 3]
