"""What routers chose, by places of the KV cache; and SGLang's recorder of it. No engine needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import EXPERT_MODELS

from hybridrl.errors import ModelError
from hybridrl.models.family import ModelShape, resolve_family
from hybridrl.rollout import sglang_routing
from hybridrl.rollout.engine import Request, RunningRequest, SamplingParams
from hybridrl.rollout.experts_by_slot import ExpertsBySlot

CPU = torch.device("cpu")
LAYERS = [0, 2, 3]  # of qwen3-moe here, whose second layer is dense


def shape_of(**changes: Any) -> ModelShape:
    config = {**EXPERT_MODELS["qwen3-moe"], **changes}
    return resolve_family(None, config).shape(config)


@pytest.mark.parametrize(
    ("num_experts", "kept", "told"),
    [(8, torch.uint8, np.uint8), (256, torch.int16, np.uint8), (300, torch.int16, np.int16)],
)
def test_choices_are_read_by_slot_until_they_are_forgotten(
    num_experts: int, kept: torch.dtype, told: type
) -> None:
    held = ExpertsBySlot("vllm", shape_of(num_experts=num_experts), 9, CPU, LAYERS)
    assert held.layers == (0, 2, 3) and held.dtype == kept
    held.write(torch.tensor([7, 1]), 1, torch.tensor([[num_experts - 1, 3], [4, 5]]))
    with pytest.raises(RuntimeError, match="vllm told no experts for a part of 1 tokens"):
        held.read(torch.tensor([1]))
    for index in (0, 2):
        held.write(torch.tensor([1, 7]), index, torch.tensor([[index, 6], [index, 7]]))
    found = held.read(torch.tensor([7, 1]))
    assert found.dtype == told
    assert found.tolist() == [[0, 7, num_experts - 1, 3, 2, 7], [0, 6, 4, 5, 2, 6]]
    held.write_all(torch.tensor([2]), torch.ones(1, 3, 2, dtype=kept))
    assert held.read(torch.tensor([2])).tolist() == [[1] * 6]
    held.forget()
    with pytest.raises(RuntimeError, match="told no experts"):
        held.read(torch.tensor([2]))


@pytest.mark.parametrize("found", [[], [0, 2], [0, 1, 2, 3], [0, 2, 2, 3]])
def test_layers_without_a_router_are_refused(found: list[int]) -> None:
    with pytest.raises(ModelError, match=r"one in each layer with experts: 0, 2, 3") as caught:
        ExpertsBySlot("sglang", shape_of(), 9, CPU, found)
    assert "Set algorithm.router_replay=off" in caught.value.remedy


def test_sglangs_recorder_keeps_a_pass_and_tells_it_by_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_routing, "_routed", lambda model: LAYERS)
    recorder = sglang_routing.RecordedExperts(torch.nn.Module(), shape_of(), 9, 6, CPU)
    for layer in LAYERS:  # four tokens of two requests, and one that pads the pass
        recorder.capture(layer, torch.tensor([[layer, 4 + i] for i in range(4)] + [[7, 7]]))
    recorder.on_forward_end(SimpleNamespace(out_cache_loc=torch.tensor([5, 3, 8, 1])))
    slots = torch.tensor([[1, 0, 0, 0], [5, 8, 3, 0]], dtype=torch.int32)
    pool = SimpleNamespace(req_to_token=slots)
    expected = [[0, 4, 2, 4, 3, 4], [0, 6, 2, 6, 3, 6], [0, 5, 2, 5, 3, 5]]
    assert recorder.get_topk(1, 4, pool).tolist() == expected
    row = RunningRequest(Request(0, (1, 2), 0, SamplingParams()))
    recorder.record(SimpleNamespace(req_pool_idx=None), row, pool, 3)  # it has no place
    assert row.experts is None
    recorder.record(SimpleNamespace(req_pool_idx=1), row, pool, 3)
    assert row.experts is not None and row.experts.tolist() == expected[:2]
    recorder.forget()
    with pytest.raises(RuntimeError, match="sglang told no experts"):
        recorder.get_topk(1, 4, pool)
