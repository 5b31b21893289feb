"""What a pipeline stage knows of what it receives; real stages are in tests/dist/test_parity.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state

from hybridrl.parallel.stages import KnownShapes

LENGTHS = (48, 40, 8)
NONE = [0, 0, 0]


def stage(monkeypatch: pytest.MonkeyPatch, sequence_parallel: bool = False) -> KnownShapes:
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_group", lambda: group)
    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda _, rank: rank)
    sizes = {"hidden_size": 16, "tensor_model_parallel_size": 4}
    more = {"virtual_pipeline_model_parallel_size": None}
    return KnownShapes(
        SimpleNamespace(sequence_parallel=sequence_parallel, **sizes, **more), LENGTHS
    )


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
    with pytest.raises(RuntimeError, match=r"shape \[48, 1, 16\].* says \[40, 1, 16\]"):
        send(48)
