"""What a pipeline stage knows of what it receives; real stages are in tests/dist/test_parity.py."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state

from hybridrl.parallel.stages import KnownShapes

LENGTHS = (48, 40, 8)
NONE = [0, 0, 0]


def stage(
    monkeypatch: pytest.MonkeyPatch,
    sequence_parallel: bool = False,
    rank: int = 1,
    size: int = 3,
    lengths: Sequence[int] = LENGTHS,
    num_chunks: int = 1,
) -> KnownShapes:
    """Returns what a stage knows, one in the middle unless told."""
    group = SimpleNamespace(size=lambda: size, rank=lambda: rank)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda _, rank: rank)
    sizes = {"hidden_size": 16, "tensor_model_parallel_size": 4}
    more = {
        "virtual_pipeline_model_parallel_size": None if num_chunks == 1 else num_chunks,
        "microbatch_group_size_per_vp_stage": size,
    }
    config = SimpleNamespace(sequence_parallel=sequence_parallel, **sizes, **more)
    return KnownShapes(config, lengths, num_chunks)


def test_activations_and_gradients_come_in_the_order_of_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One forward, one backward: each direction goes on where it was."""
    known = stage(monkeypatch)
    assert known._communicate_shapes(None, None, True, False) == ([48, 1, 16], NONE)
    assert known._communicate_shapes(None, None, True, True) == ([40, 1, 16], [48, 1, 16])
    assert known._communicate_shapes(None, None, False, True) == (NONE, [40, 1, 16])
    assert known._communicate_shapes(None, None, True, False) == ([8, 1, 16], NONE)


def test_ranks_that_share_a_sequence_get_a_part_each(monkeypatch: pytest.MonkeyPatch) -> None:
    known = stage(monkeypatch, sequence_parallel=True)
    assert known._communicate_shapes(None, None, True, False)[0] == [12, 1, 16]


@pytest.mark.parametrize("rank", [0, 1])
def test_chunks_of_stages_come_in_the_order_of_the_schedule(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages of two chunks, four micro-batches: pairs of these go through all chunks."""
    lengths = (8, 16, 24, 32)
    known = stage(monkeypatch, rank=rank, size=2, lengths=lengths, num_chunks=2)
    every = [8, 16, 8, 16, 24, 32, 24, 32]
    # Where the first chunk's activations, or the last chunk's gradients, come from no stage.
    half = [8, 16, 24, 32]
    took = [half, every] if rank == 0 else [every, half]
    for direction, expected in enumerate(took):
        asked = [direction == 0, direction == 1]
        found = [known._communicate_shapes(None, None, *asked)[direction][0] for _ in expected]
        assert found == expected
        with pytest.raises(RuntimeError, match="more tensors than it has micro-batches"):
            known._communicate_shapes(None, None, *asked)
    gave = [every, half] if rank == 0 else [half, every]
    for direction, expected in enumerate(gave):
        for length in expected:
            tensors: list[torch.Tensor | None] = [None, None]
            tensors[direction] = torch.empty(length, 1, 16)
            known._communicate_shapes(*tensors, False, False)


@pytest.mark.parametrize("direction", [0, 1])
def test_a_tensor_of_another_shape_is_not_sent(
    direction: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = stage(monkeypatch)

    def send(length: int) -> None:
        tensors: list[torch.Tensor | None] = [None, None]
        tensors[direction] = torch.empty(length, 1, 16)
        known._communicate_shapes(*tensors, False, False)

    send(48)
    with pytest.raises(RuntimeError, match=r"shape \[48, 1, 16\].* has shape \[40, 1, 16\]"):
        send(48)
