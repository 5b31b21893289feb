"""Block FP8: the reference's numbers, and which parameters share a scratch."""

from __future__ import annotations

import random

import pytest
import torch

from hybridrl import ops
from hybridrl.hybrid_engine.transports.quantized import is_whole, share_scratch


def test_scales_and_values_of_a_known_weight() -> None:
    weight = torch.zeros(130, 256)
    weight[0, 0], weight[5, 7], weight[129, 200] = -4.48, 0.1, 3.0
    scales = ops.block_scales(weight)
    assert torch.allclose(scales, torch.tensor([[0.01, 1e-4 / 448], [1e-4 / 448, 3 / 448]]))
    values = ops.quantize_blocks(weight, scales).float()
    assert (values[0, 0], values[5, 7], values[129, 200]) == (-448, 10, 448)
    assert values.count_nonzero() == 3


def test_a_block_that_is_cut_has_the_largest_scale_of_its_pieces() -> None:
    weight = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    whole = ops.block_scales(weight)
    pieces = [ops.block_scales(weight[:200]), ops.block_scales(weight[200:], row=200 - 128)]
    assert torch.equal(torch.maximum(pieces[0][1], pieces[1][0]), whole[1])
    assert torch.equal(pieces[1][1], whole[2])
    cut = ops.quantize_blocks(weight[200:, 60:], whole[1:], row=200 - 128, column=60)
    wanted = ops.quantize_blocks(weight, whole)[200:, 60:]
    assert torch.equal(cut.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize(
    ("box", "whole"),
    [
        (((0, 128), (0, 200)), True),
        (((128, 300), (128, 200)), True),
        (((0, 256), (0, 199)), False),
        (((100, 228), (0, 200)), False),
        (((256, 299), (0, 200)), False),
    ],
)
def test_whole_blocks_end_at_multiples_or_at_the_edge(box: tuple, whole: bool) -> None:
    assert is_whole(box, (300, 200)) == whole
    assert is_whole(((3, 4), *box), (8, 300, 200)) == whole


def test_scratches_are_shared_by_those_alone_that_do_not_live_together() -> None:
    rng = random.Random(0)
    for _ in range(200):
        spans, sizes = {}, {}
        for name in map(str, range(rng.randint(0, 12))):
            first = rng.randint(0, 8)
            spans[name], sizes[name] = (first, first + rng.randint(0, 3)), rng.randint(1, 9)
        starts, total = share_scratch(spans, sizes)
        for one in spans:
            assert 0 <= starts[one] <= total - sizes[one]
            for other in spans:
                is_apart = spans[one][1] < spans[other][0] or spans[other][1] < spans[one][0]
                stops = starts[one] + sizes[one], starts[other] + sizes[other]
                no_overlap = stops[0] <= starts[other] or stops[1] <= starts[one]
                assert one == other or is_apart or no_overlap
    in_turn = {str(i): (i, i) for i in range(9)}
    assert share_scratch(in_turn, dict.fromkeys(in_turn, 7))[1] == 7
