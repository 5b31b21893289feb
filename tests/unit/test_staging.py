"""Copies staged in destinations that are written last, against copying one by one."""

from __future__ import annotations

import pytest
import torch
from some_cases import some

from hybridrl.hybrid_engine.transports.blocks import stage_copies
from hybridrl.hybrid_engine.transports.transport import Pair


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


@pytest.mark.parametrize("seed", some(range(20), 6))
def test_staged_copies_end_as_if_copied_one_by_one(seed: int) -> None:
    pairs, memory = random_pairs(seed)
    found = stage_copies(pairs)
    wanted = torch.full_like(memory, -1)
    for source, dest in pairs:
        wanted.flatten()[dest.storage_offset() :].as_strided(dest.shape, dest.stride()).copy_(
            source
        )
    memory.fill_(-1)
    # 'direct' may come while slices are in staging memory.
    for source, dest in (*found.to_staging, *found.direct, *found.from_staging, *found.last):
        dest.copy_(source)
    for index in found.unstaged:
        pairs[index][1].copy_(pairs[index][0])
    assert torch.equal(memory, wanted)
    cut_up = [pair for pair in pairs if not pair[1].is_contiguous()]
    assert len(found.to_staging) + len(found.unstaged) == len(cut_up)
    assert found.to_staging
    num_bytes = [sum(dest.nbytes for _, dest in part) for part in (found.to_staging, found.direct)]
    assert num_bytes[0] <= num_bytes[1]
    assert all(dest.data_ptr() % 16 == 0 for _, dest in found.to_staging)


def test_without_blocks_there_is_no_staging_memory() -> None:
    memory = torch.zeros(8, 8)
    pairs = [(torch.ones(8, 3), memory[:, :3]), (torch.ones(8, 5), memory[:, 3:])]
    found = stage_copies(pairs)
    assert found.unstaged == [0, 1]
    assert not (found.to_staging or found.direct or found.last)
