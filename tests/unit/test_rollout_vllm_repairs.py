"""What is looked up in vLLM's own modules: a name that is not there is said, not passed over."""

from __future__ import annotations

import functools
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.errors import ModelError
from hybridrl.rollout.vllm_experts import deal_experts
from hybridrl.rollout.vllm_start import (
    SECOND_RUNNER_LIST,
    compute_on_current_stream,
    take_second_runner,
)


def mixture(**maps: Any) -> torch.nn.Module:
    """A layer of four experts, of which two are here."""
    layer = torch.nn.Module()
    layer.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 3))
    for name, value in maps.items():
        setattr(layer, name, value)
    return torch.nn.Sequential(layer)


def test_experts_are_dealt_in_every_map() -> None:
    own, managed = (torch.tensor([0, 1, -1, -1]) for _ in range(2))
    manager = SimpleNamespace(expert_map=managed)
    deal_experts(mixture(expert_map=own, expert_map_manager=manager), [1, 2])
    assert own.tolist() == managed.tolist() == [-1, 0, 1, -1]


@pytest.mark.parametrize(
    "maps",
    [
        {},
        {"expert_map": torch.tensor([0, 1, -1, -1])},
        {"expert_map_manager": SimpleNamespace(expert_map=torch.tensor([0, 1, -1, -1]))},
        {"expert_map": torch.tensor([0, 1, -1, -1]), "expert_map_manager": SimpleNamespace()},
        {
            "expert_map": torch.tensor([0, 1, -1, -1]),
            "expert_map_manager": SimpleNamespace(expert_map=torch.tensor([0, -1, -1, -1])),
        },
    ],
)
def test_a_layer_without_maps_is_refused(maps: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="expert_map") as caught:
        deal_experts(mixture(**maps), [1, 2])
    assert caught.value.remedy == "Set rollout.ep=1."


def test_a_step_on_another_stream_is_waited_for_where_its_tokens_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Runner:  # as vLLM's
        device = "cuda"

        @functools.cached_property
        def main_stream(self) -> Any:
            return torch.cuda.current_stream(self.device)  # type: ignore[arg-type]

    streams = iter(["of the main thread", "beside", "beside too"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: next(streams))
    runner = Runner()
    assert [runner.main_stream, runner.main_stream] == ["of the main thread"] * 2
    compute_on_current_stream(Runner)
    assert [runner.main_stream, runner.main_stream] == ["beside", "beside too"]


@pytest.mark.parametrize("has_list", [True, False])
def test_models_join_those_of_the_second_runner(
    monkeypatch: pytest.MonkeyPatch, has_list: bool
) -> None:
    """And the list of a version that has one keeps what vLLM put there."""
    theirs = {SECOND_RUNNER_LIST: frozenset(["Theirs"])} if has_list else {}
    vllm_config = SimpleNamespace(**theirs)
    package = SimpleNamespace(vllm=vllm_config)
    for name, module in (("vllm", SimpleNamespace(config=package)), ("vllm.config", package)):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    take_second_runner(["Qwen3MoeForCausalLM"])
    take_second_runner(["Qwen3MoeForCausalLM", "Other"])
    expected = {SECOND_RUNNER_LIST: {"Theirs", "Qwen3MoeForCausalLM", "Other"}} if has_list else {}
    assert vars(vllm_config) == expected


@pytest.mark.engine
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")
def test_the_stream_of_a_step_has_the_name_that_is_looked_for() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    assert "main_stream" in vars(GPUModelRunner)
