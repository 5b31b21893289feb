"""Which tokens come first over all ranks, without every rank telling all of its own."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from batches import train_batch
from thread_ranks import ThreadRank, on_ranks

from hybridrl.algorithms.over_tokens import NUM_MARKS, OverTokens
from hybridrl.parallel.exchange import bring

whole_batch = cache(lambda: train_batch(400, 4))


@pytest.mark.parametrize("count", [1, 7, 300, 2000, 10**6])
@pytest.mark.parametrize("num_values", [1, 5, 10**9])
def test_the_first_tokens_of_all_ranks_are_those_of_the_whole_batch(
    count: int, num_values: int
) -> None:
    rng = np.random.default_rng(count + num_values)
    whole = whole_batch()
    num = int(whole.response_lengths_B.sum())
    assert num > 4 * NUM_MARKS
    order_R = torch.from_numpy(rng.integers(0, num_values, num).astype(np.float64))
    key_R = torch.from_numpy(rng.permutation(num))
    named_R = torch.from_numpy(rng.random(num) < 0.8)
    expected_R = np.zeros(num, bool)
    named = named_R.nonzero()[:, 0].numpy()
    first = np.lexsort((key_R[named].numpy(), order_R[named].numpy()))[:count]
    expected_R[named[first]] = True
    column_T = torch.full((whole.num_tokens,), -1)
    column_T[whole.response_mask_T] = torch.arange(num)
    table_BW = torch.from_numpy(rng.random((whole.num_samples, 3)) < 0.4)
    table_BW[:, 0] |= ~table_BW.any(1)

    def look(world: ThreadRank) -> None:
        batch = bring(whole, table_BW, world)
        places = whole.token_places(batch.rows_H)
        own_R = column_T[places][batch.response_mask_T]
        index_N = named_R[own_R].nonzero()[:, 0]
        at_N = own_R[index_N]
        told: list[int] = []
        gather = world.gather_objects

        def counted(value: tuple) -> list:
            told.append(len(value[0]))
            return gather(value)

        world.gather_objects = counted  # type: ignore[method-assign]
        over = OverTokens(batch)
        found_N = over.are_first(index_N, order_R[at_N], key_R[at_N], count)
        assert found_N.tolist() == expected_R[at_N].tolist()
        # Marks first, and then hardly more than are taken.
        assert told[0] <= NUM_MARKS
        world.gather_objects = gather  # type: ignore[method-assign]
        named_by_all = sum(world.gather_objects(told[1]))
        assert named_by_all <= min(count, len(named)) + 3 * (num // NUM_MARKS + 1)

    on_ranks(3, look)
