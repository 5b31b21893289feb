"""Which parameters Muon updates, what a plan knows about them, and what a step copies."""

from __future__ import annotations

from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model

from hybridrl.config.schema import ModelConfig
from hybridrl.config.source import read_model_config
from hybridrl.models.boxes import volume
from hybridrl.models.family import Family, ModelShape, read_model
from hybridrl.models.weights import megatron_layout
from hybridrl.parallel.layout import TrainLayout
from hybridrl.services.planner.muon_costs import num_by_adamw, scratch_bytes
from hybridrl.training import muon
from hybridrl.training.muon import Muon
from hybridrl.training.muon_matrices import matrices_of

MODELS = Path(__file__).parents[2] / "benchmarks" / "models"


def model_of(name: str) -> tuple[Family, ModelShape]:
    return read_model(None, read_model_config(ModelConfig(init=str(MODELS / f"{name}.json"))))


@pytest.mark.parametrize("name", ["qwen2.5-0.5b", "qwen3.5-4b", "gpt-oss-20b", "moonlight-16b-a3b"])
def test_a_plan_counts_the_parameters_that_muon_leaves_to_adamw(name: str) -> None:
    family, shape = model_of(name)
    layout = megatron_layout(family, shape, TrainLayout(1), 0)
    matrices = matrices_of([layout], 0)
    rest = sum(volume(one.hf_box) for one in layout.regions if one.local not in matrices)
    assert num_by_adamw(family, shape, TrainLayout(1), "lm") == rest
    assert 0 < rest < 0.5 * sum(prod(size) for size in layout.shapes.values())


def test_adamw_updates_matrices_of_one_row() -> None:
    family, shape = read_model(None, tiny_model("qwen2_moe").config.to_dict())
    layout = megatron_layout(family, shape, TrainLayout(1), 0)
    gates = {name for name in layout.shapes if "gate_weight" in name}
    assert gates and not gates & matrices_of([layout], 0).keys()


@pytest.mark.parametrize(("tp", "each"), [(1, 2 * 4 + 12), (2, 4 + 2 * 4 + 12)])
def test_a_plan_counts_the_memory_of_fused_matrices(tp: int, each: int) -> None:
    """Beside one matrix, its iteration and the changes of gate and up, their gathered parts."""
    family, shape = model_of("qwen2.5-7b")
    found = scratch_bytes(family, shape, TrainLayout(tp, tp), "lm")
    assert found == each * shape.ffn_size * shape.hidden_size


def test_updates_are_gathered_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of a rank's part would need as much memory as a part of all gradients."""
    whole, parameter, gathered = torch.zeros(8), torch.zeros(1), []

    def gather(output: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        gathered.append(output is whole and own.data_ptr() == whole[4:].data_ptr())

    monkeypatch.setattr(muon.dist, "all_gather_into_tensor", gather)
    bucket = SimpleNamespace(params=[parameter], grad_data=whole)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)
    optimizer = SimpleNamespace(
        data_parallel_group=group, buffers=[SimpleNamespace(buckets=[bucket])]
    )
    one: Any = SimpleNamespace(_optimizer=optimizer, _matrices={parameter: ()})
    Muon._gather_updates(one)
    assert gathered == [True]
