"""Token columns arrive whole wherever they are wanted, each row once, and nothing else does."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from batches import observed_batch, train_batch
from some_cases import some
from thread_ranks import ThreadRank, on_ranks

from hybridrl.contracts.batch import BatchError, Producer, RolloutBatch, TrainBatch
from hybridrl.contracts.checks import columns_of
from hybridrl.contracts.holders import Holders
from hybridrl.parallel.exchange import Route, bring, collect

PER_TOKEN = [name for name, column in columns_of(TrainBatch).items() if column.per_token]


def random_table(rng: random.Random, num: int, size: int) -> torch.Tensor:
    """Returns a table of holders in which each sample has one or more, and some ranks none."""
    table_BW = torch.zeros(num, size, dtype=torch.bool)
    used = rng.sample(range(size), rng.randint(1, size))
    for row in table_BW:
        row[rng.sample(used, rng.randint(1, len(used)))] = True
    return table_BW


def assert_is_part(found: TrainBatch, whole: TrainBatch, rank: int) -> None:
    """The batch of a rank has the whole one's samples, and the tokens that its table says."""
    assert found.holders is not None
    rows = found.holders.by_rank_BW[:, rank].nonzero()[:, 0]
    assert torch.equal(found.rows_H, rows)
    assert torch.equal(found.response_lengths_B, whole.response_lengths_B)
    assert found.prompts == whole.prompts and found.num_samples == whole.num_samples
    if len(rows):
        own = whole.select(rows)
        assert torch.equal(found.response_mask_T, own.response_mask_T)
        assert torch.equal(found.lengths_H, own.lengths_B)
    for name, value in whole.columns().items():
        expected = value if name not in PER_TOKEN else value[:0]
        if name in PER_TOKEN and len(rows):
            expected = own.columns()[name]
        assert torch.equal(found.columns()[name], expected), name
    assert found.blobs.keys() == whole.blobs.keys()
    for name, blob in whole.blobs.items():
        assert torch.equal(found.blobs[name].num_rows_B, blob.num_rows_B)
        expected = whole.select(rows).blobs[name].values_N if len(rows) else blob.values_N[:0]
        assert torch.equal(found.blobs[name].values_N, expected), name


@pytest.mark.parametrize("seed", some(range(30), 10))
def test_a_batch_is_wherever_it_is_wanted(seed: int) -> None:
    rng = random.Random(seed)
    size, made = rng.randint(1, 5), rng.choice([train_batch, observed_batch])
    whole = made(rng.randint(1, 5), rng.randint(1, 3), seed)
    tables = [random_table(rng, whole.num_samples, size) for _ in range(3)]
    order = rng.sample(range(whole.num_samples), rng.randint(1, whole.num_samples))

    def walk(world: ThreadRank) -> None:
        batch = bring(whole, tables[0], world)
        assert world.sent_bytes == 0  # each rank had all
        assert_is_part(batch, whole, world.rank)
        for table_BW in tables[1:]:
            lacking_BW = table_BW & ~batch.holders.by_rank_BW
            before = sum(world.gather_objects(world.sent_bytes))
            batch = bring(batch, table_BW, world)
            assert_is_part(batch, whole, world.rank)
            # Token numbers travel as 4 bytes; nothing goes where it is already.
            columns = [whole.columns()[name] for name in PER_TOKEN if name in whole.columns()]
            widths = [min(one.element_size(), 4) * one[0].numel() for one in columns]
            moved = int((lacking_BW.sum(1) * whole.lengths_B).sum()) * sum(widths)
            for blob in whole.blobs.values():
                row = blob.values_N[:1].numel() * blob.values_N.element_size()
                moved += int((lacking_BW.sum(1) * blob.num_rows_B).sum()) * row
            assert sum(world.gather_objects(world.sent_bytes)) - before == moved
        some = batch.select(order)
        assert_is_part(some, whole.select(order), world.rank)
        halves = [batch.select(order[: len(order) // 2 + 1]), batch.select(order)]
        assert_is_part(
            TrainBatch.concat(halves),
            TrainBatch.concat([whole.select(order[: len(order) // 2 + 1]), whole.select(order)]),
            world.rank,
        )
        found = collect(batch, world, size - 1)
        assert (found is None) == (world.rank != size - 1)
        if found is not None:
            assert found.holders is None and found.num_observed_B is None
            assert found.columns().keys() == whole.columns().keys()
            for name, value in whole.columns().items():
                assert torch.equal(found.columns()[name], value), name

    on_ranks(size, walk)


def test_a_column_comes_from_the_ranks_that_computed_it() -> None:
    whole = train_batch(2, 2)
    have_BW = torch.tensor([[0, 1, 0], [0, 1, 0], [1, 0, 0], [1, 0, 0]]).bool()
    want_BW = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 1, 1], [1, 0, 1]]).bool()
    seen_BW = torch.tensor([[1, 1, 0], [1, 1, 0], [1, 1, 0], [1, 1, 0]]).bool()

    def move(world: ThreadRank) -> None:
        seen = bring(whole, seen_BW, world)
        # What another rank computed is wrong here.
        is_own_T = have_BW[:, world.rank][seen.sample_index_T]
        column_T = torch.where(is_own_T, seen.values_T, 99.0)
        route = Route(whole.lengths_B, have_BW, want_BW, world, seen.rows_H)
        expected = bring(whole, want_BW, world).values_T
        assert torch.equal(route(column_T), expected)

    on_ranks(3, move)


def test_ranks_that_have_the_same_samples_send_alike() -> None:
    whole = train_batch(24, 1)
    have_BW = torch.tensor([[1, 1, 1, 0]] * 24).bool()
    want_BW = torch.tensor([[0, 0, 0, 1]] * 24).bool()

    def move(world: ThreadRank) -> list[int]:
        bring(bring(whole, have_BW, world), want_BW, world)
        return world.gather_objects(world.sent_bytes)

    sent = on_ranks(4, move)[0]
    assert sent[3] == 0
    assert max(sent) < 0.5 * sum(sent), sent


def test_samples_that_no_rank_has_are_named() -> None:
    whole = train_batch(2, 2)
    have_BW = torch.tensor([[1, 0], [1, 0], [0, 0], [1, 0]]).bool()
    want_BW = torch.ones(4, 2, dtype=torch.bool)

    def move(world: ThreadRank) -> None:
        with pytest.raises(ValueError, match="no rank has the tokens of sample 2"):
            Route(whole.lengths_B, have_BW, want_BW, world)

    on_ranks(2, move)


def test_what_ranks_know_of_their_samples_is_completed_from_the_first_that_has_it() -> None:
    table_BW = torch.tensor([[0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 1]]).bool()

    def complete(world: ThreadRank) -> None:
        holders = Holders(table_BW, world)
        rows_H = table_BW[:, world.rank].nonzero()[:, 0]
        told_H = 10.0 * rows_H + world.rank
        assert holders.completed(told_H).tolist() == [1, 10, 20, 32]
        wide_H2 = torch.stack((told_H, -told_H), 1)
        assert holders.completed(wide_H2)[:, 1].tolist() == [-1, -10, -20, -32]
        special = torch.tensor([torch.nan, -torch.inf, 1e30, -0.0])
        assert torch.equal(
            holders.completed(special[rows_H]).isnan(), torch.tensor([True, False, False, False])
        )
        assert holders.completed(special[rows_H])[1] == -torch.inf

    on_ranks(3, complete)


def test_columns_are_checked_against_the_tokens_of_this_rank() -> None:
    whole, here = train_batch(2, 2), Producer.here("test")
    watched = observed_batch(2, 2)
    table_BW = torch.tensor([[1, 0], [1, 0], [0, 1], [0, 1]]).bool()

    def check(world: ThreadRank) -> None:
        batch, seen = bring(whole, table_BW, world), bring(watched, table_BW, world)
        assert seen.num_observed_B.any()
        size = batch.num_tokens
        assert size < whole.num_tokens
        with pytest.raises(BatchError, match=rf"expected \({size},\) floats"):
            batch.join_columns(here, values_T=torch.zeros(whole.num_tokens))
        with pytest.raises(BatchError, match="zero on prompt tokens"):
            batch.join_columns(here, values_T=torch.ones(size))
        with pytest.raises(BatchError, match=rf"expected \({size},\) integers"):
            replace(batch, tokens_T=whole.tokens_T)
        for wrong in (-2000, 1, 10**6):
            counts_B = seen.num_observed_B + wrong
            with pytest.raises(BatchError, match="num_observed_B"):
                replace(seen, num_observed_B=counts_B)
            with pytest.raises(BatchError, match="num_observed_B"):
                seen.join_columns(here, num_observed_B=counts_B)
        with pytest.raises(BatchError, match="holders"):
            RolloutBatch.concat([batch, whole])

    on_ranks(2, check)
