"""Samples to micro-batches and back: padding, the shift by one, and what is masked."""

from __future__ import annotations

import pytest
import torch
from batches import FEATURES, rollout_batch, train_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.contracts.batch import BatchError, MicroBatch, RolloutBatch
from hybridrl.contracts.micro_batch import LOSS_COLUMNS
from hybridrl.training.batches.collation import micro_batch, unpack

COLUMNS = tuple(name.removesuffix("_S") for name in LOSS_COLUMNS if name.endswith("_S"))


def samples(batch: RolloutBatch) -> list[slice]:
    offsets = batch.offsets.tolist()
    return [slice(a, b) for a, b in zip(offsets, offsets[1:], strict=False)]


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    cp=st.sampled_from([1, 2, 3]),
    tp=st.sampled_from([1, 2, 4]),
    data=st.data(),
)
def test_micro_batch_agrees_with_a_loop_over_positions(seed, cp, tp, data):
    batch = train_batch(3, 2, seed)
    indices = data.draw(st.permutations(range(6)))[: data.draw(st.integers(1, 6))]
    each = 2 * cp if cp > 1 else 1
    micro = micro_batch(batch, indices, each, tp * each)
    cu = micro.cu_seqlens.tolist()
    assert micro.cu_seqlens.dtype == torch.int32
    assert cu[-1] == micro.num_positions and micro.num_positions % (tp * each) == 0
    assert micro.sample_indices == tuple(indices)
    seen = torch.zeros(micro.num_positions, dtype=torch.bool)
    experts, features = batch.blobs["routed_experts"], batch.blobs[FEATURES.name]
    of_samples = experts.values_N.split(experts.num_rows_B.tolist())
    experts_SK = micro.model_inputs["routed_experts"].value
    is_there_S = micro.model_inputs["routed_experts.is_there"].value
    for k, i in enumerate(indices):
        where, start = samples(batch)[i], cu[k]
        assert start % each == 0
        prompt = int(batch.prompt_lengths_B[i])
        for t in range(where.stop - where.start):
            position, token = start + t, where.start + t
            seen[position] = True
            assert micro.tokens_S[position] == batch.tokens_T[token]
            assert micro.positions_S[position] == t
            assert micro.sequence_index_S[position] == k
            is_last = token + 1 == where.stop
            predicts = not is_last and t + 1 >= prompt
            assert micro.targets_S[position] == (0 if is_last else batch.tokens_T[token + 1])
            assert micro.loss_mask_S[position] == predicts
            for name in COLUMNS:
                value = getattr(micro, f"{name}_S")[position]
                assert value == (getattr(batch, f"{name}_T")[token + 1] if predicts else 0)
            assert is_there_S[position] == (not is_last)
            if not is_last:
                assert torch.equal(experts_SK[position], of_samples[i][t])
            else:
                assert not experts_SK[position].any()
    padding = ~seen
    assert not is_there_S[padding].any() and not experts_SK[padding].any()
    rows = features.values_N.split(features.num_rows_B.tolist())
    assert torch.equal(
        micro.model_inputs[FEATURES.name].value, torch.cat([rows[i] for i in indices])
    )
    assert micro.model_inputs[f"{FEATURES.name}.num_rows"].value.tolist() == [
        len(rows[i]) for i in indices
    ]
    assert not micro.loss_mask_S[padding].any()
    assert (micro.sequence_index_S[padding] == -1).all()
    assert (micro.tokens_S[padding] == 0).all() and (micro.targets_S[padding] == 0).all()
    for a, b in zip(cu, cu[1:], strict=False):
        assert micro.positions_S[a:b].tolist() == list(range(b - a))
    assert micro.max_seqlen == max(b - a for a, b in zip(cu, cu[1:], strict=False))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pads=st.sampled_from([(1, 1), (1, 4), (4, 4), (4, 16), (6, 12)]),
    data=st.data(),
)
def test_unpack_undoes_micro_batch(seed, pads, data):
    batch = train_batch(4, 2, seed)
    order = data.draw(st.permutations(range(8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, 8), max_size=3)))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, 8], strict=True)]
    micros = [micro_batch(batch, part, *pads) for part in parts]
    for name in COLUMNS:
        # Garbage outside the mask, as a model's outputs on padding are, must not come back.
        noisy = [
            torch.where(m.loss_mask_S, getattr(m, f"{name}_S"), torch.tensor(torch.nan))
            for m in micros
        ]
        assert torch.equal(unpack(micros, noisy, batch), getattr(batch, f"{name}_T"))


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_several_values_a_token_go_the_way_of_one(shares_prompts):
    batch = train_batch(3, 4, seed=1)
    # Column k of the wide one is a column of its own.
    narrow = [
        batch.join_columns(batch.producer, values_T=batch.teacher_logp_TK[:, k].clone())
        for k in range(3)
    ]
    order, pads = [4, 5, 6, 0, 1], (1, 4)
    micro = micro_batch(batch, order, *pads, shares_prompts)
    for k, one in enumerate(narrow):
        expected_S = micro_batch(one, order, *pads, shares_prompts).values_S
        assert torch.equal(micro.teacher_logp_SK[:, k], expected_S) and expected_S.any()
    tokens_SK = micro.teacher_tokens_SK
    assert tokens_SK.dtype == torch.int32
    assert torch.equal(tokens_SK.ne(0).all(1), micro.loss_mask_S)
    asked = torch.cat((micro.targets_S[:, None], tokens_SK), 1)
    assert torch.equal(micro.labels, asked) and asked.dtype == torch.int64
    part = micro.take_positions(torch.arange(1, micro.num_positions, 3))
    assert torch.equal(part.teacher_tokens_SK, tokens_SK[1::3])
    held_T = torch.isin(batch.sample_index_T, torch.tensor(order))[:, None]
    if shares_prompts:  # those of a shared prompt are there once, as its first sample has them
        rows = batch.blobs["routed_experts"].values_N.split((batch.lengths_B - 1).tolist())
        experts_SK = micro.model_inputs["routed_experts"].value
        is_there_S = micro.model_inputs["routed_experts.is_there"].value
        for position in is_there_S.nonzero()[:, 0].tolist():
            sample = order[int(micro.sequence_index_S[position])]
            at = int(micro.positions_S[position])
            assert torch.equal(experts_SK[position], rows[sample][at])
    back_TK = unpack([micro], [micro.teacher_logp_SK], batch)
    assert torch.equal(back_TK, batch.teacher_logp_TK * held_T)


@pytest.mark.parametrize("shares_prompts", [False, True])
def test_a_score_stands_at_its_own_token(shares_prompts):
    batch, order = train_batch(3, 4, seed=1), [4, 5, 6, 0, 1]
    micro = micro_batch(batch, order, 1, 4, shares_prompts, at_own_token=True)
    rows = batch.values_T.split(batch.lengths_B.tolist())
    tokens = batch.tokens_T.split(batch.lengths_B.tolist())
    found = 0
    for position in micro.loss_mask_S.nonzero()[:, 0].tolist():
        sample, at = order[int(micro.sequence_index_S[position])], int(micro.positions_S[position])
        assert micro.tokens_S[position] == tokens[sample][at]
        assert micro.values_S[position] == rows[sample][at] != 0
        found += 1
    assert found == int(batch.response_lengths_B[order].sum())
    held_T = torch.isin(batch.sample_index_T, torch.tensor(order))
    assert torch.equal(unpack([micro], [micro.values_S], batch), batch.values_T * held_T)


def test_unpack_leaves_samples_of_other_ranks_zero():
    batch = train_batch()
    halves = [[0, 3, 4], [5, 1, 2]]
    parts = []
    for half in halves:
        micro = micro_batch(batch, half, 1, 4)
        parts.append(unpack([micro], [micro.values_S], batch))
        others = [i for i in range(6) if i not in half]
        assert all((parts[-1][samples(batch)[i]] == 0).all() for i in others)
    assert torch.equal(parts[0] + parts[1], batch.values_T)


def test_unpack_refuses_a_slice_of_the_positions():
    batch = train_batch()
    micro = micro_batch(batch, [0, 1], 1, 1)
    with pytest.raises(ValueError, match="results for"):
        unpack([micro], [micro.values_S[:-1]], batch)


def test_an_empty_micro_batch_is_one_sequence_of_padding():
    micro = micro_batch(train_batch(), [], 4, 8)
    assert micro.cu_seqlens.tolist() == [0, 8] and micro.max_seqlen == 8
    assert not micro.loss_mask_S.any()
    assert micro.sequence_index_S.tolist() == [-1] * 8
    assert micro.sample_indices == ()


def test_columns_that_the_batch_does_not_carry_are_none():
    batch = rollout_batch()
    micro = micro_batch(batch, [0], 1, 1)
    assert micro.behaviour_logp_S is not None
    assert micro.advantages_S is None and micro.values_S is None
    with pytest.raises(BatchError, match="grpo"):
        micro.require("advantages_S", "grpo")


def test_take_positions_slices_every_column_alike():
    batch = train_batch()
    micro = micro_batch(batch, [2, 0, 1], 4, 8)
    index_S = torch.arange(micro.num_positions).flip(0)[::3]
    part = micro.take_positions(index_S)
    for name, value in vars(micro).items():
        if name.endswith("_S"):
            assert torch.equal(getattr(part, name), value[index_S])
    for name, one in micro.model_inputs.items():
        expected = one.value[index_S] if one.is_per_position else one.value
        assert torch.equal(part.model_inputs[name].value, expected)
    assert torch.equal(part.cu_seqlens, micro.cu_seqlens)
    assert (part.max_seqlen, part.sample_indices) == (micro.max_seqlen, micro.sample_indices)
    assert part.num_positions == len(index_S)


def test_to_moves_every_tensor():
    moved = micro_batch(train_batch(), [0, 1], 1, 1).to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    tensors += [one.value for one in moved.model_inputs.values()]
    assert len(tensors) == 20 and all(tensor.device.type == "meta" for tensor in tensors)
    assert isinstance(moved, MicroBatch)
