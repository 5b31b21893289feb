"""Tokens with which several sequences of agents begin, and how they are packed."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from some_cases import some
from test_plan_packing import config_of, shape_of

from hybridrl.contracts.batch import MicroBatch, Producer, Prompt, Rollout, RolloutBatch
from hybridrl.contracts.blobs import KINDS, BlobKind
from hybridrl.contracts.branches import branches_of
from hybridrl.models.megatron.attention import SharedPrompts
from hybridrl.parallel.layout import TrainLayout
from hybridrl.services.planner.micro_batch_sizes import largest_micro_batch
from hybridrl.training.batches.branches import Branches, BranchGroup
from hybridrl.training.batches.collation import micro_batch
from hybridrl.training.batches.packing import round_up
from hybridrl.training.batches.prompt_sharing import ScheduleInputs, schedule_samples

NUM_GROUPS = 3


def drawn(seed: int) -> tuple[list[Rollout], list[int]]:
    """Returns episodes whose sequences leave earlier ones anywhere, and train no token of these."""
    draw = random.Random(seed)
    rollouts, groups, sample = [], [], 0

    def tokens(count: int) -> list[int]:
        return [draw.randrange(50) for _ in range(count)]

    for group in range(NUM_GROUPS):
        context = tokens(draw.randint(1, 12))
        for _ in range(draw.randint(1, 4)):
            whole: list[list[int]] = []
            for sequence in range(draw.randint(1, 5)):
                old: list[int] = []
                if sequence and draw.random() < 0.8:
                    other = draw.choice(whole)
                    old = other[: draw.randint(1, len(other))]
                new = tokens(draw.randint(1, 10))
                row = (old or list(context)) + new
                before = min(len(old), len(context)) if old else len(context)
                first = len(old) if old else len(context)
                observed = tuple(i < first for i in range(before, len(row)))
                prompt = Prompt(group, "", tuple(row[:before]), {})
                response = tuple(row[before:])
                logps = (0.0,) * len(response)
                rollouts.append(
                    Rollout(sample, prompt, response, logps, "stop", 0, observed, sequence=sequence)
                )
                groups.append(group)
                whole.append(row)
            sample += 1
    return rollouts, groups


def batch_of(seed: int) -> tuple[RolloutBatch, Branches]:
    rollouts, groups = drawn(seed)
    batch = RolloutBatch.from_rollouts(rollouts, groups, Producer.here("the test"))
    return batch, branches_in(batch)


def branches_in(batch: RolloutBatch) -> Branches:
    columns = (batch.sample_ids_B, batch.sequence_B, batch.group_B, batch.context_B)
    columns += (batch.prompt_lengths_B, batch.branch_of_B, batch.branch_tokens_B)
    return Branches.of(*(column.tolist() for column in columns))


def sequences_of(batch: RolloutBatch) -> list[list[int]]:
    return [part.tolist() for part in batch.tokens_T.split(batch.lengths_B.tolist())]


@pytest.mark.parametrize("seed", some(range(20), 6))
def test_sequences_share_what_they_have_in_common(seed: int) -> None:
    batch, branches = batch_of(seed)
    rows = sequences_of(batch)
    trained = [part.tolist() for part in batch.response_mask_T.split(batch.lengths_B.tolist())]
    for row, (parent, shared) in enumerate(zip(branches.parents, branches.shared, strict=True)):
        assert (parent >= 0) == (shared > 0) and parent < row
        if shared:
            assert rows[row][:shared] == rows[parent][:shared]
        assert not any(trained[row][: shared + 1])
        # A context that an earlier sequence of the group has is shared, and no earlier sequence of
        # the same sample has more in common.
        length = int(batch.prompt_lengths_B[row])
        for other in range(row):
            is_same_group = batch.group_B[row] == batch.group_B[other]
            context = rows[other][: int(batch.prompt_lengths_B[other])]
            if is_same_group and rows[row][:length] == context:
                assert shared >= length - 1
            if batch.sample_ids_B[other] == batch.sample_ids_B[row]:
                pairs = zip(rows[row], rows[other], strict=False)
                common = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
                if common is None:
                    common = min(len(rows[row]), len(rows[other]))
                assert shared >= min(common - 1, trained[row].index(True) - 1)
    some = sorted(random.Random(seed).sample(range(len(rows)), len(rows) // 2))
    among = branches.of_rows(some)
    for row, (parent, shared) in enumerate(zip(among.parents, among.shared, strict=True)):
        if shared:
            assert rows[some[row]][:shared] == rows[some[parent]][:shared]
            assert not any(trained[some[row]][: shared + 1])


def places_of(micro: MicroBatch, among: Branches, number: int, length: int) -> list[int]:
    """Returns the packed positions of the first tokens of a sequence."""
    shared, start = among.shared[number], int(micro.cu_seqlens[number])
    before: list[int] = []
    if shared:
        before = places_of(micro, among, among.parents[number], min(length, shared))
    return before + list(range(start, start + length - len(before)))


def copied_rows(micro: MicroBatch, cp: int) -> int:
    """Returns the rows of keys that attention stores for a micro-batch, summed over ranks."""
    if micro.prefix_sequences is None:
        return micro.num_positions
    gathered = cp * micro.num_positions if cp > 1 else 0
    return gathered + sum(len(shared_of(micro, cp, rank).keys.index_K) for rank in range(cp))


def shared_of(micro: MicroBatch, cp: int, rank: int = 0) -> SharedPrompts:
    assert micro.prefix_sequences is not None
    starts = tuple(micro.cu_seqlens.tolist())
    before = tuple(micro.positions_S[micro.cu_seqlens[:-1].long()].tolist())
    positions_S = torch.zeros(1, dtype=torch.int64)
    return SharedPrompts(starts, micro.prefix_sequences, before, positions_S, cp, rank)


@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_no_micro_batch_copies_more_keys_than_planned(seed: int, cp: int) -> None:
    """Chains of short turns that grow copy as many keys as a unit may have."""
    draw, pad_each = random.Random(seed), 2 * cp if cp > 1 else 1
    rollouts, groups = [], []
    for sample in range(4):
        prompt = Prompt(0, "", tuple(range(draw.randint(1, 30))), {})
        grown = [draw.randrange(50) for _ in range(draw.randint(1, 60))]
        for number in range(20):
            new = [draw.randrange(50) for _ in range(draw.randint(1, 3))]
            observed = (True,) * len(grown) + (False,) * len(new)
            grown += new
            logps = (0.0,) * len(grown)
            rollouts.append(
                Rollout(sample, prompt, tuple(grown), logps, "stop", 0, observed, sequence=number)
            )
            groups.append(0)
    batch = RolloutBatch.from_rollouts(rollouts, groups, Producer.here("the test"))
    branches = branches_in(batch)
    budget = 512
    overrides = (
        "agent.server=true",
        "steps.prompts_per_step=1",
        "train.share_prompts=true",
    )
    config = config_of(256, 512, budget, *overrides)
    largest = largest_micro_batch(config, shape_of(config), TrainLayout(cp, cp=cp))
    lengths = tuple(round_up(n, pad_each) for n in batch.lengths_B.tolist())
    rows = tuple(range(len(lengths)))
    inputs = ScheduleInputs(
        lengths, rows, None, (len(rows),), 1, budget, 1, 10_000, pad_each, branches
    )
    found = []
    for micro_rows in (micro for micros in schedule_samples(inputs) for micro in micros):
        micro = micro_batch(batch, micro_rows, pad_each, pad_each, True, branches=branches)
        found.append(copied_rows(micro, cp))
    assert largest.positions == budget
    assert max(found) <= largest.key_rows
    # The bound is not far away.
    assert max(found) > 0.5 * largest.key_rows


@pytest.mark.parametrize("pad_each", [1, 4])
@pytest.mark.parametrize("seed", some(range(10), 4))
def test_micro_batches_store_each_trained_position_once(seed: int, pad_each: int) -> None:
    batch, branches = batch_of(seed)
    rows, ends = sequences_of(batch), batch.offsets.tolist()
    lengths = tuple(round_up(n, pad_each) for n in batch.lengths_B.tolist())
    budget = max(*lengths, 64)
    inputs = ScheduleInputs(
        lengths,
        tuple(range(len(rows))),
        None,
        (len(rows),),
        2,
        budget,
        1,
        10_000,
        pad_each,
        branches,
    )
    assignments = schedule_samples(inputs)
    packed = [row for micros in assignments for micro in micros for row in micro]
    assert sorted(packed) == list(range(len(rows)))
    stored = 0
    for micro_rows in (micro for micros in assignments for micro in micros):
        micro = micro_batch(batch, micro_rows, pad_each, pad_each, True, branches=branches)
        assert micro.num_positions <= budget
        stored += micro.num_tokens
        among = branches.of_rows(micro_rows)
        for number, row in enumerate(micro_rows):
            places = places_of(micro, among, number, len(rows[row]))
            if micro.prefix_sequences is not None:
                before = places[: among.shared[number]]
                assert shared_of(micro, pad_each // 2 or 1).prefix_rows(number).tolist() == before
            assert micro.tokens_S[places].tolist() == rows[row]
            assert micro.positions_S[places].tolist() == list(range(len(rows[row])))
            trained = batch.response_mask_T[ends[row] : ends[row + 1]].nonzero()[:, 0]
            predicting = torch.tensor(places)[trained - 1]
            assert bool(micro.loss_mask_S[predicting].all())
            assert micro.targets_S[predicting].tolist() == [rows[row][i] for i in trained.tolist()]
            assert set(micro.sequence_index_S[predicting].tolist()) == {number}
        of_micro = sum(int(batch.response_lengths_B[row]) for row in micro_rows)
        assert int(micro.loss_mask_S.sum()) == of_micro
    assert stored < int(batch.lengths_B.sum()) or max(branches.shared) == 0


def test_units_that_are_too_large_are_divided() -> None:
    parents, shared = (-1, 0, 1, 0, 3), (0, 20, 25, 10, 15)
    lengths = (30, 30, 30, 30, 30)
    group = BranchGroup(range(5), Branches(parents, shared), lengths, 1)
    (whole,) = group.filled_units(100, 10_000)
    assert whole.tokens == 30 + 10 + 5 + 20 + 15 and whole.key_rows == 150
    assert whole.attended == 5 * 900 - (400 + 625 + 100 + 225)
    units = group.filled_units(45, 10_000)
    assert [unit.samples for unit in units] == [(0, 1, 2), (3, 4)]
    assert [unit.tokens for unit in units] == [45, 45]
    # Siblings share what both have in common with a parent that is elsewhere.
    assert Branches(parents, shared).of_rows([2, 4]) == Branches((-1, 0), (0, 10))


def test_equal_tokens_with_images_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "pictures", BlobKind("pictures", ("float32",), rows="any"))
    one = drawn(1)[0][0]
    images = {"pictures": np.zeros((1, 1), np.float32)}
    twice = [one, replace(one, sequence=1, blobs=images)]
    assert [tuple(branch) for branch in branches_of(twice)][1] == (-1, 0, -1)


def test_units_copy_few_keys() -> None:
    lengths = (100,) + (101,) * 9
    group = BranchGroup(range(10), Branches((-1, *[0] * 9), (0, *[99] * 9)), lengths, 1)
    units = group.filled_units(1000, 10_000)
    assert len(units) == 3
    assert all(unit.key_rows <= 4 * unit.tokens for unit in units)
