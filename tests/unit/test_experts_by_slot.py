"""What routers chose, by places of the KV cache; and SGLang's recorder of it. No engine needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from engine_cases import EXPERT_MODELS

from hybridrl.models.family import ModelShape, resolve_family
from hybridrl.rollout.common.experts_by_slot import ExpertsBySlot
from hybridrl.rollout.engine import Request, RunningRequest, SamplingParams
from hybridrl.rollout.sglang import routing as sglang_routing
from hybridrl.rollout.vllm import routing as vllm_routing

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
    with pytest.raises(RuntimeError, match="vllm recorded no experts for some of 1 tokens"):
        held.read(torch.tensor([1]))
    for index in (0, 2):
        held.write(torch.tensor([1, 7]), index, torch.tensor([[index, 6], [index, 7]]))
    found = held.read(torch.tensor([7, 1]))
    assert found.dtype == told
    assert found.tolist() == [[0, 7, num_experts - 1, 3, 2, 7], [0, 6, 4, 5, 2, 6]]
    held.write_all(torch.tensor([2]), torch.ones(1, 3, 2, dtype=kept))
    assert held.read(torch.tensor([2])).tolist() == [[1] * 6]
    held.forget()
    with pytest.raises(RuntimeError, match="recorded no experts"):
        held.read(torch.tensor([2]))


@pytest.mark.parametrize("is_newer", [False, True])
def test_sglangs_recorder_keeps_a_pass_and_tells_it_by_request(
    monkeypatch: pytest.MonkeyPatch, is_newer: bool
) -> None:
    """Newer versions keep a request's slots in a record of their own."""
    monkeypatch.setattr(sglang_routing, "_routed", lambda model: LAYERS)
    recorder = sglang_routing.RecordedExperts(torch.nn.Module(), shape_of(), 9, 6, CPU)
    for layer in LAYERS:  # four tokens of two requests, and one that pads the pass
        recorder.capture(layer, torch.tensor([[layer, 4 + i] for i in range(4)] + [[7, 7]]))
    recorder.on_forward_end(SimpleNamespace(out_cache_loc=torch.tensor([5, 3, 8, 1])))
    slots = torch.tensor([[1, 0, 0, 0], [5, 8, 3, 0]], dtype=torch.int32)
    pool = SimpleNamespace(req_to_token=slots)
    expected = [[0, 4, 2, 4, 3, 4], [0, 6, 2, 6, 3, 6], [0, 5, 2, 5, 3, 5]]
    assert recorder.get_topk(1, 4, pool).tolist() == expected
    rows = [RunningRequest(Request(i, (1, 2), 0, SamplingParams())) for i in range(3)]
    placed = SimpleNamespace(req_pool_idx=1, kv_committed_len=3)
    nowhere = SimpleNamespace(req_pool_idx=None, kv_committed_len=0)
    begun = SimpleNamespace(req_pool_idx=1, kv_committed_len=1)  # taken back, and read in again
    if is_newer:
        placed, nowhere, begun = (SimpleNamespace(kv=kv) for kv in (placed, nowhere, begun))
    asked = [(placed, rows[0], 3), (nowhere, rows[1], 3), (begun, rows[2], 3)]
    for _ in range(2):
        recorder.record(asked, pool)
        assert [row.num_recorded() for row in rows] == [2, 0, 1]
    for row in rows:
        row.append(4, 0.0, 0)
    assert [{n: rows_PK.tolist() for n, rows_PK in row.blobs.items()} for row in rows] == [
        {"routed_experts": expected[:2]},
        {},
        {"routed_experts": expected[:1]},
    ]
    recorder.forget()
    with pytest.raises(RuntimeError, match="sglang recorded no experts"):
        recorder.get_topk(1, 4, pool)


def test_vllms_experts_are_recorded_as_far_as_they_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests in pieces: the rest of their blocks has choices of earlier requests."""
    monkeypatch.setattr(vllm_routing, "_routers", lambda model: dict.fromkeys(LAYERS, Router()))
    monkeypatch.setattr(vllm_routing.RecordedExperts, "_writer", lambda self, index: None)
    monkeypatch.setattr(vllm_routing, "cache_fits", lambda manager: True)
    spec = SimpleNamespace(block_size=4)
    cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)], num_blocks=3)
    recorder = vllm_routing.RecordedExperts(torch.nn.Module(), cache, shape_of(), CPU)
    blocks, freed = {"0-0": [2, 0]}, list[str]()
    manager = SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=[spec]),
        get_block_ids=lambda name: (blocks.get(name, []),),
    )
    request = SimpleNamespace(request_id="0-0", num_computed_tokens=6)
    scheduler = SimpleNamespace(
        kv_cache_manager=manager,
        requests={"0-0": request},
        _free_request_blocks=lambda request: freed.append(request.request_id),
    )
    row = RunningRequest(Request(0, (1, 2, 3), 0, SamplingParams(), (4, 5, 6, 7), (0.0,) * 4, 0))
    running = {"0-0": row}
    recorder.attach(scheduler, running)
    recorder._experts.write_all(torch.arange(13), (torch.arange(13 * 6).view(13, 3, 2) % 8).byte())
    expected = [[(place * 6 + i) % 8 for i in range(6)] for place in (8, 9, 10, 11, 0, 1)]
    recorder.record_running()
    assert row.blobs["routed_experts"].tolist() == expected
    scheduler._free_request_blocks(request)  # it is preempted
    blocks.clear()
    request.num_computed_tokens = 0
    scheduler._free_request_blocks(request)  # and aborted
    assert freed == ["0-0"] * 2 and row.blobs["routed_experts"].tolist() == expected
    request.num_computed_tokens = 7
    with pytest.raises(RuntimeError, match="0 slots for 7 computed tokens of request 0-0"):
        recorder.record_running()
    running.clear()  # nobody wants it
    recorder.record_running()
    row.drop_unsettled()
    assert row.num_recorded() == 6


class Router:
    def set_capture_fn(self, function: object) -> None: ...
