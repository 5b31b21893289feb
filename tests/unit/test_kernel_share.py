"""The kernel takes blocks of the ranks that all wait for, at no rank's cost."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hybridrl.hybrid_engine.transports.blocks import kernel_shares, split_blocks

MB = 1_000_000


def without_own(rows: list[int]) -> np.ndarray:
    """Bytes that each rank holds for each of the others, the same for all."""
    found = np.repeat(np.array(rows)[:, None], len(rows), axis=1) * MB
    np.fill_diagonal(found, 0)
    return found


def links(sent: np.ndarray) -> tuple[list[int], list[int]]:
    return sent.sum(axis=1).tolist(), sent.sum(axis=0).tolist()


def test_blocks_of_two_ranks_are_evened_out() -> None:
    """Four shards of a 7B model: embedding and head are blocks of the first and the last."""
    cut_up, blocks = without_own([234, 330, 330, 234]), without_own([718, 622, 622, 718])
    moved = kernel_shares(cut_up, blocks)
    assert (moved >= 0).all() and (moved <= blocks).all() and (moved.diagonal() == 0).all()
    busiest = max(*links(cut_up)[0], *links(cut_up)[1])
    sent, read = links(cut_up + moved)
    assert max(*sent, *read) <= busiest  # of the first phase: nobody waits longer
    sent, read = links(blocks - moved)
    assert max(sent) <= 1.01 * 3 * 622 * MB < max(links(blocks)[0])
    assert max(sent) <= 1.01 * max(read)


@pytest.mark.parametrize(
    ("cut_up", "blocks"),
    [
        (without_own([300, 300, 300]), without_own([600, 600, 600])),  # all alike
        (without_own([0, 0, 0]), without_own([900, 100, 100])),  # nothing runs beside
        (without_own([300, 100, 100]), without_own([600, 100, 100])),  # busy in both phases
        (np.zeros((1, 1)), np.zeros((1, 1))),
    ],
)
def test_where_nothing_is_gained_nothing_moves(cut_up: np.ndarray, blocks: np.ndarray) -> None:
    assert not kernel_shares(cut_up, blocks).any()


def test_a_rank_that_reads_most_keeps_its_copy_engines() -> None:
    """Which bring more a second than the kernel: to move its bytes would cost it time."""
    cut_up, blocks = np.zeros((4, 4)), np.zeros((4, 4))
    cut_up[0, 1] = 100 * MB
    blocks[:3, 3] = 200 * MB
    assert not kernel_shares(cut_up, blocks).any()


def block(rows: int, is_strided: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.arange(rows * 8, dtype=torch.float32).view(rows, 8)
    dest = torch.zeros(rows, 16)[:, :8] if is_strided else torch.zeros(rows, 8)
    return source, dest


@pytest.mark.parametrize("num_rows", [0, 1, 5, 11, 16, 30, 100])
def test_every_element_is_copied_once(num_rows: int) -> None:
    row, least = 32, 4
    pairs = [block(10), block(12, is_strided=True), block(3)]
    taken, left = split_blocks(pairs, num_rows * row, least * row)
    for source, dest in [*taken, *left]:
        assert source.shape == dest.shape and not dest.any()
        dest.add_(source)
    for source, dest in pairs:
        assert torch.equal(source, dest)
    assert sum(dest.nbytes for _, dest in taken) <= num_rows * row
    whole = {10, 12, 3}
    assert all(len(dest) >= least or len(dest) in whole for _, dest in left)
    if num_rows == 0:
        assert not taken and all(a is b for a, b in zip(left, pairs, strict=True))
    if num_rows in (1, 5):  # the one that needs staging first
        assert [dest.data_ptr() for _, dest in taken] == [pairs[1][1].data_ptr()]
        assert len(taken[0][1]) == num_rows
    if num_rows == 100:
        assert not left
