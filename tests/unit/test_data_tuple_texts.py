"""Texts of many rows of numbers at once: each is what Python writes of the tuple."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridrl.data import tuple_texts
from hybridrl.data.tuple_texts import MOST_IN_TABLE, TupleTexts, runs

TOKENS = st.integers(0, 1200)
ANY = st.integers(-(2**31), 2**31 - 1)


def texts(rows: list[list[int]], largest: int) -> list[bytes]:
    numbers = np.array([number for row in rows for number in row], np.int32)
    return TupleTexts(largest)(numbers, np.array([len(row) for row in rows], np.int64))


@pytest.mark.parametrize("numbers", [TOKENS, ANY])
@pytest.mark.parametrize("shortest", [0, 1])
def test_each_text_is_that_of_the_tuple(monkeypatch, numbers, shortest) -> None:
    monkeypatch.setattr(tuple_texts, "FEWEST", 0)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.lists(numbers, min_size=shortest, max_size=6), max_size=8))
    def check(rows: list[list[int]]) -> None:
        largest = max((number for row in rows for number in row), default=-1)
        assert texts(rows, largest) == [str(tuple(row)).encode() for row in rows]

    check()


@pytest.mark.parametrize("rows", [[[3], [-1, 2]], [[7, 8], [], [9]], [[1, MOST_IN_TABLE]]])
def test_rows_that_the_table_does_not_have_are_written_too(monkeypatch, rows) -> None:
    monkeypatch.setattr(tuple_texts, "FEWEST", 0)
    largest = max(number for row in rows for number in row)
    assert texts(rows, largest) == [str(tuple(row)).encode() for row in rows]


def test_the_longest_texts_fit_the_table(monkeypatch) -> None:
    monkeypatch.setattr(tuple_texts, "FEWEST", 0)
    most = MOST_IN_TABLE - 1
    assert texts([[most, 99_999, 100_000, most], [most]], most) == [
        b"(999999, 99999, 100000, 999999)",
        b"(999999,)",
    ]


def test_a_number_above_the_largest_that_was_told_is_no_other_number(monkeypatch) -> None:
    monkeypatch.setattr(tuple_texts, "FEWEST", 0)
    assert texts([[3, 6], [5]], largest=4) == [b"(3, 6)", b"(5,)"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 12))
def test_runs_cover_all_rows_in_order_and_are_bounded(lengths: list[int], most: int) -> None:
    found = list(runs(np.array(lengths, np.int64), most))
    rows = [row for start, end in found for row in range(start, end)]
    assert rows == list(range(len(lengths)))
    for start, end in found:
        assert sum(lengths[start:end]) <= most or end - start == 1
