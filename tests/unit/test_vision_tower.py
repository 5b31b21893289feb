"""A vision tower whose blocks attend in one call for all chunks of equal length."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)

from hybridrl.models.vision.tower import ChunkedAttention, Chunks

SIZES: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 16,
    "fullatt_block_indexes": [1],
}


@pytest.mark.parametrize(
    ("grids", "num_calls"),
    [
        ([[1, 16, 16]], 3),  # windows of one size in blocks 0 and 2, the image in block 1
        # Windows of 64, 48, 16 and 12 patches; the small image is one of 16. Two sizes of images.
        ([[1, 10, 14], [1, 4, 4], [1, 10, 14]], 4 + 2 + 4),
    ],
)
def test_chunks_of_equal_length_attend_together(grids: list[list[int]], num_calls: int) -> None:
    torch.manual_seed(0)
    theirs, ours = (
        Qwen2_5_VisionTransformerPretrainedModel._from_config(
            Qwen2_5_VLVisionConfig(**SIZES), attn_implementation="sdpa"
        )
        for _ in range(2)
    )
    ours.load_state_dict(theirs.state_dict())
    chunks = Chunks()
    for block in ours.blocks:
        block.attn = ChunkedAttention(block.attn, chunks)
    ours.load_state_dict(theirs.state_dict())  # names of parameters have not changed
    grid = torch.tensor(grids)
    patches = torch.randn(int(grid.prod(1).sum()), 3 * 2 * 14 * 14)
    found = []
    attend = torch.nn.functional.scaled_dot_product_attention
    with mock.patch("torch.nn.functional.scaled_dot_product_attention", wraps=attend) as calls:
        for tower in (theirs, ours):
            calls.reset_mock()
            output = tower(patches, grid_thw=grid, return_dict=True).pooler_output
            output.square().sum().backward()
            found.append((output, dict(tower.named_parameters())))
        assert calls.call_count == num_calls
    (expected, expected_of), (output, of) = found
    torch.testing.assert_close(output, expected, atol=2e-6, rtol=0)
    largest = max(float(one.grad.abs().max()) for one in expected_of.values())
    for name, one in of.items():
        torch.testing.assert_close(one.grad, expected_of[name].grad, atol=1e-6 * largest, rtol=0)
