"""Samples that hold their prompt once: units, their layout in a micro-batch, and the way back."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from batches import train_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from some_cases import some

from hybridrl.contracts.micro_batch import LOSS_COLUMNS
from hybridrl.training.batches.collation import micro_batch, unpack
from hybridrl.training.batches.packing import Schedule, even_sizes, schedule
from hybridrl.training.batches.prompt_sharing import (
    KEY_ROWS_OF_BUDGET,
    ScheduleInputs,
    Unit,
    make_units,
    schedule_lookups,
    schedule_samples,
)

COLUMNS = tuple(name.removesuffix("_S") for name in LOSS_COLUMNS if name.endswith("_S"))


def tokens_of(seed: int, num_prompts: int, group: int) -> tuple[list[int], list[int], list[int]]:
    """Returns each sample's prompt, its length and that of the whole."""
    draw = random.Random(seed)
    prompts, prompt_lengths, lengths = [], [], []
    for prompt in range(num_prompts):
        length = draw.randint(1, 40)
        for _ in range(group):
            prompts.append(prompt)
            prompt_lengths.append(length)
            lengths.append(length + draw.randint(1, 60))
    return prompts, prompt_lengths, lengths


@pytest.mark.parametrize("seed", range(6))
def test_units_hold_every_sample_once_and_count_what_attends(seed: int) -> None:
    prompts, prompt_lengths, lengths = tokens_of(seed, 12, 5)
    budget, num_ranks = 400, 1 + seed % 3
    units = make_units(prompts, prompt_lengths, lengths, num_ranks, budget)
    assert sorted(sample for unit in units for sample in unit.samples) == list(range(60))
    assert len(units) < 60
    for unit in units:
        assert len({prompts[sample] for sample in unit.samples}) == 1
        assert unit.tokens <= budget
        prefix = prompt_lengths[unit.samples[0]] - 1 if len(unit.samples) > 1 else 0
        assert unit.prefix == prefix
        tails = [lengths[sample] - prefix for sample in unit.samples]
        assert unit.tokens == prefix + sum(tails)
        attends = sum(2 * i + 1 for i in range(prefix))
        attends += sum(2 * (prefix + i) + 1 for tail in tails for i in range(tail))
        assert unit.attended == attends
    found = schedule(
        [u.tokens for u in units], num_ranks, budget, attended=[u.attended for u in units]
    )
    dealt = sorted(unit for rank in found for pack in rank for unit in pack)
    assert dealt == list(range(len(units)))


@pytest.mark.parametrize(
    ("prompt", "response", "group", "num_prompts", "num_ranks", "budget", "num_units"),
    [
        (256, 512, 8, 32, 2, 32_768, 32),  # short prompts: whole groups
        (16_384, 1024, 4, 8, 2, 32_768, 8),  # a whole group is over a third of the budget
        (16_384, 1024, 8, 8, 1, 32_768, 8),
        (16_384, 1024, 16, 8, 2, 32_768, 16),  # a group exceeds the budget, and is cut in half
        (16_384, 1024, 8, 1, 2, 32_768, 2),  # both ranks have work
        (31_000, 1024, 4, 8, 2, 32_768, 32),  # no two samples fit together
    ],
)
def test_units_of_long_prompts_hold_as_many_samples_as_fit(
    prompt: int,
    response: int,
    group: int,
    num_prompts: int,
    num_ranks: int,
    budget: int,
    num_units: int,
) -> None:
    count = group * num_prompts
    prompts = [sample // group for sample in range(count)]
    units = make_units(prompts, [prompt] * count, [prompt + response] * count, num_ranks, budget)
    assert len(units) == num_units
    assert max(unit.tokens for unit in units) <= budget
    assert len({len(unit.samples) for unit in units}) == 1


def test_copies_of_a_long_prompt_are_limited() -> None:
    budget = 32_768
    units = make_units([0] * 64 + [1] * 64, [16_384] * 128, [16_640] * 128, 1, budget)
    assert sorted(sample for unit in units for sample in unit.samples) == list(range(128))
    assert 8 < len(units) < 32
    assert max(unit.key_rows for unit in units) <= KEY_ROWS_OF_BUDGET * budget


@pytest.mark.parametrize("seed", some(range(20), 6))
def test_large_units_never_make_the_costliest_rank_more_expensive(seed: int) -> None:
    draw = random.Random(seed)
    group, num_ranks, budget = draw.randint(2, 9), draw.randint(1, 4), 1000
    prompts = [sample // group for sample in range(group * draw.randint(1, 12))]
    of_prompt = [draw.randint(1, 800) for _ in range(len(prompts))]
    prompt_lengths = [of_prompt[p] for p in prompts]
    lengths = [length + draw.randint(1, 200) for length in prompt_lengths]
    parts = (len(lengths),)
    inputs = ScheduleInputs(
        tuple(lengths), tuple(prompts), tuple(prompt_lengths), parts, num_ranks, budget, 1, 10_000
    )
    alone = replace(inputs, prompt_lengths=None)

    def costliest(assignments: Schedule, shares: bool) -> int:
        found = []
        for micro_batches in assignments:
            cost = 0
            for micro in micro_batches:
                for _, run in groupby(micro, key=prompts.__getitem__):
                    own = list(run)
                    prefix = prompt_lengths[own[0]] - 1 if shares and len(own) > 1 else 0
                    unit = Unit(tuple(own), prefix, tuple(lengths[i] for i in own))
                    cost += unit.tokens * 10_000 + unit.attended
            found.append(cost)
        return max(found)

    assert costliest(schedule_samples(inputs), True) <= costliest(schedule_samples(alone), False)


def test_one_long_group_is_cut_so_that_every_rank_has_work() -> None:
    units = make_units([0] * 8, [100] * 8, [200] * 8, 4, 10_000)
    assert len(units) >= 4


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), tp=st.sampled_from([1, 2, 4]), data=st.data())
def test_a_shared_prompt_lies_once_and_positions_go_on_from_it(seed, tp, data):
    batch = train_batch(3, 3, seed)
    groups = data.draw(st.permutations(range(3)))
    indices = [i for g in groups for i in range(3 * g, 3 * g + data.draw(st.integers(1, 3)))]
    micro = micro_batch(batch, indices, 1, tp, shares_prompts=True)
    cu, offsets = micro.cu_seqlens.tolist(), batch.offsets.tolist()
    assert micro.sample_indices == tuple(indices)
    prefix_sequences = micro.prefix_sequences or (-1,) * (len(cu) - 1)
    seen = torch.zeros(micro.num_positions, dtype=torch.bool)
    number = 0
    for k, i in enumerate(indices):
        others = [j for j in indices if batch.group_B[j] == batch.group_B[i]]
        prompt, length = int(batch.prompt_lengths_B[i]), int(batch.lengths_B[i])
        prefix = prompt - 1 if len(others) > 1 else 0
        tokens = batch.tokens_T[offsets[i] : offsets[i] + length]
        if prefix and i == others[0]:
            held = slice(cu[number], cu[number + 1])
            assert micro.tokens_S[held].tolist() == tokens[:prefix].tolist()
            assert micro.positions_S[held].tolist() == list(range(prefix))
            assert not micro.loss_mask_S[held].any()
            seen[held], shared = True, number
            assert prefix_sequences[number] == -1
            number += 1
        held = slice(cu[number], cu[number + 1])
        assert prefix_sequences[number] == (shared if prefix else -1)
        assert micro.tokens_S[held].tolist() == tokens[prefix:].tolist()
        assert micro.positions_S[held].tolist() == list(range(prefix, length))
        assert micro.sequence_index_S[held].tolist() == [k] * (length - prefix)
        for t in range(prefix, length):
            position, token = cu[number] + t - prefix, offsets[i] + t
            predicts = t + 1 < length and t + 1 >= prompt
            assert micro.loss_mask_S[position] == predicts
            if t + 1 < length:
                assert micro.targets_S[position] == batch.tokens_T[token + 1]
            for name in COLUMNS:
                value = getattr(micro, f"{name}_S")[position]
                assert value == (getattr(batch, f"{name}_T")[token + 1] if predicts else 0)
        seen[held] = True
        number += 1
    assert not micro.loss_mask_S[~seen].any() and (micro.sequence_index_S[~seen] == -1).all()
    assert micro.max_seqlen >= max(int(batch.lengths_B[i]) for i in indices)
    for name in COLUMNS:
        noise = torch.tensor(torch.nan)
        noisy = torch.where(micro.loss_mask_S, getattr(micro, f"{name}_S"), noise)
        plain = micro_batch(batch, indices, 1, tp)
        wanted = unpack([plain], [getattr(plain, f"{name}_S")], batch)
        assert torch.equal(unpack([micro], [noisy], batch), wanted)


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("num_parts", [1, 3, 16])
@pytest.mark.parametrize("multiple", [1, 4])
def test_lookups_are_of_a_ranks_own_samples_in_fewer_micro_batches(
    shares: bool, num_parts: int, multiple: int
) -> None:
    groups, prompts, lengths = tokens_of(num_parts, 16, 4)
    budget, num_ranks, shown = 400, 4, tuple(prompts) if shares else None
    sizes = tuple(even_sizes(64, num_parts)), num_ranks, budget, multiple, 1000
    inputs = ScheduleInputs(tuple(lengths), tuple(groups), shown, *sizes)
    updates, lookups = schedule_samples(inputs), schedule_lookups(inputs)
    for one, other in zip(updates, lookups, strict=True):
        rows = [sorted(row for micro in micros for row in micro) for micros in (one, other)]
        assert rows[0] == rows[1]
        assert len(other) == len(lookups[0]) and len(other) % multiple == 0
        for micro in other:
            assert sum(lengths[row] for row in micro) <= budget or shares
    assert sorted(row for micros in lookups for micro in micros for row in micro) == list(range(64))
    # A part of the samples is dealt as it is by itself: its tokens are there in the update.
    if num_parts == 1:
        assert lookups == updates
    else:
        assert len(lookups[0]) <= len(updates[0]) - 12 * (num_parts == 16)
        size = 64 // num_parts if num_parts == 16 else 22
        part = tuple(lengths[:size]), tuple(groups[:size]), shown and shown[:size]
        alone = schedule_samples(ScheduleInputs(*part, (size,), *sizes[1:]))
        assert [micros[: len(alone[0])] for micros in updates] == alone
