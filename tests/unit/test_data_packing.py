"""Packs and the bounds of packed sequences."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridrl.errors import DataError
from hybridrl.training.batches.packing import even_sizes, pack, packed_bounds

LENGTHS = st.lists(st.integers(1, 100), min_size=1, max_size=60)


@given(LENGTHS, st.integers(100, 250))
def test_pack_holds_every_sample_once_within_the_budget(lengths, budget):
    packs = pack(lengths, budget)
    assert sorted(i for members in packs for i in members) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in members) <= budget for members in packs)


@given(LENGTHS, st.integers(100, 250))
def test_pack_leaves_at_most_one_pack_less_than_half_full(lengths, budget):
    # True of any "fit" rule: two such packs would have been one.
    sums = [sum(lengths[i] for i in members) for members in pack(lengths, budget)]
    assert sum(2 * total <= budget for total in sums) <= 1


def test_pack_puts_a_sample_where_it_fits_best():
    assert sorted(pack([6, 5, 4, 5], 10)) == [(0, 2), (1, 3)]


def test_pack_names_a_sample_longer_than_the_budget():
    with pytest.raises(DataError, match="sample 1 has 101 tokens") as caught:
        pack([3, 101], 100)
    assert caught.value.name == "train.micro_batch_tokens"


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 4), st.integers(1, 4))
def test_packed_bounds_pad_each_sample_and_the_whole(lengths, cp, tp):
    each, whole = 2 * cp, tp * 2 * cp
    bounds = packed_bounds(lengths, each, whole)
    sequences = [b - a for a, b in zip(bounds.cu_seqlens, bounds.cu_seqlens[1:], strict=False)]
    assert bounds.cu_seqlens[0] == 0
    assert bounds.total % whole == 0 and bounds.total >= whole
    assert all(s > 0 and s % each == 0 for s in sequences)
    assert bounds.starts == bounds.cu_seqlens[: len(lengths)]
    for length, padded in zip(lengths, sequences, strict=False):
        assert length <= padded < length + each
    assert len(sequences) - len(lengths) in (0, 1)
    assert bounds.total - sum(sequences[: len(lengths)]) < whole or not lengths
    assert bounds.max_seqlen == max(sequences)


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 3), st.integers(1, 3))
def test_max_seqlen_is_the_total_only_for_a_single_sequence(lengths, cp, tp):
    # Otherwise Megatron's packed rotary embedding would number positions over the whole pack.
    bounds = packed_bounds(lengths, 2 * cp, tp * 2 * cp)
    assert (bounds.max_seqlen == bounds.total) == (len(bounds.cu_seqlens) == 2)


def test_packed_bounds_refuse_a_total_that_cuts_a_sequence():
    with pytest.raises(ValueError, match="multiple of pad_each=4"):
        packed_bounds([3], 4, 6)


def test_even_sizes_differ_by_one_and_none_is_empty() -> None:
    assert even_sizes(10, 4) == [3, 3, 2, 2]
    assert even_sizes(2, 4) == [1, 1], "what dropped responses may leave of a step of four updates"
