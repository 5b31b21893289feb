"""A transport takes tensors of one device only: its kernels go by addresses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.hybrid_engine.planning.plan import plan_reshard
from hybridrl.hybrid_engine.transports.packed import PackedTransport
from hybridrl.models.weights import hf_layout


def transport(source: torch.Tensor, dest: torch.Tensor) -> PackedTransport:
    layout = hf_layout({"w": (4, 2)})
    plan = plan_reshard([layout], [layout], 4)
    one_rank: Any = SimpleNamespace(rank=0, size=1, gather_objects=lambda value: [value])
    sources, dests = {"w": source}, {"w": dest}
    return PackedTransport(plan, one_rank, sources, dests, 1 << 20, torch.float32)


def test_transport_copies_between_tensors_of_one_device() -> None:
    dest = torch.zeros(4, 2)
    transport(torch.ones(4, 2), dest).run()
    assert dest.eq(1).all()


def test_transport_refuses_a_tensor_of_another_device_by_name() -> None:
    with pytest.raises(ValueError, match="w of the engine is on meta, but other tensors are on"):
        transport(torch.ones(4, 2), torch.zeros(4, 2, device="meta"))
