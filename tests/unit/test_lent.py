"""Blocks that land where another's content is still to come, against copying one by one."""

from __future__ import annotations

import pytest
import torch

from hybridrl.hybrid_engine.lent import lend
from hybridrl.hybrid_engine.transport import Pair


def random_pairs(seed: int) -> tuple[list[Pair], torch.Tensor]:
    """Returns pairs of random blocks, and the one tensor that all destinations are parts of."""
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    memory = torch.full((400, 96), -1.0)
    pairs: list[Pair] = []
    row = 0
    while row < 360:
        rows, columns = number(1, 24), number(1, 96)
        dest = memory[row : row + rows]
        if number(0, 2):
            dest = dest[:, :columns]
        pairs.append((torch.rand(dest.shape, generator=generator), dest))
        row += rows
    return pairs, memory


@pytest.mark.parametrize("seed", range(20))
def test_what_is_lent_ends_as_if_copied_one_by_one(seed: int) -> None:
    pairs, memory = random_pairs(seed)
    lent = lend(pairs)
    wanted = torch.full_like(memory, -1)
    for source, dest in pairs:
        wanted.flatten()[dest.storage_offset() :].as_strided(dest.shape, dest.stride()).copy_(
            source
        )
    memory.fill_(-1)
    # 'plain' may come while what is staged lies where it has landed, and before it is unpacked.
    for source, dest in (*lent.staged, *lent.plain, *lent.unpacked, *lent.lenders):
        dest.copy_(source)
    for index in lent.without_room:
        pairs[index][1].copy_(pairs[index][0])
    assert torch.equal(memory, wanted)
    cut_up = [pair for pair in pairs if not pair[1].is_contiguous()]
    assert len(lent.staged) + len(lent.without_room) == len(cut_up)
    assert lent.staged
    staged, plain = (sum(dest.nbytes for _, dest in part) for part in (lent.staged, lent.plain))
    assert staged <= plain
    assert all(dest.data_ptr() % 16 == 0 for _, dest in lent.staged)


def test_without_blocks_there_is_no_room() -> None:
    memory = torch.zeros(8, 8)
    pairs = [(torch.ones(8, 3), memory[:, :3]), (torch.ones(8, 5), memory[:, 3:])]
    lent = lend(pairs)
    assert lent.without_room == [0, 1]
    assert not (lent.staged or lent.plain or lent.lenders)
