"""What is looked up in vLLM's own modules: a name that is not there is said, not passed over."""

from __future__ import annotations

import functools
import sys
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hybridrl.errors import ModelError
from hybridrl.rollout.vllm.experts import deal_experts
from hybridrl.rollout.vllm.start import (
    SECOND_RUNNER_LIST,
    any_world_size,
    compute_on_current_stream,
    second_runner,
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


def test_gpt_oss_does_not_ask_for_the_size_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    name, jobs = "vllm.model_executor.models", SimpleNamespace(is_initialized=lambda: True)
    models, model = ModuleType(name), ModuleType(f"{name}.gpt_oss")
    models.gpt_oss, model.dist = model, jobs  # type: ignore[attr-defined]
    for module in (ModuleType("vllm"), ModuleType("vllm.model_executor"), models, model):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    with any_world_size(("GptOssForCausalLM",)):
        assert not model.dist.is_initialized()
    with any_world_size(("LlamaForCausalLM",)):
        assert model.dist is jobs


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


@pytest.fixture
def vllm_config(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's module of its configuration, as in 0.26."""
    config = SimpleNamespace(**{SECOND_RUNNER_LIST: frozenset(["Theirs"])})
    package = SimpleNamespace(vllm=config)
    for name, module in (("vllm", SimpleNamespace(config=package)), ("vllm.config", package)):
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    return config


def test_an_engine_of_a_mixture_starts_with_the_second_runner(vllm_config: SimpleNamespace) -> None:
    """And what vLLM itself gives to it keeps it."""
    with second_runner(["Qwen3MoeForCausalLM", "Other"]):
        listed = {"Theirs", "Qwen3MoeForCausalLM", "Other"}
        assert vars(vllm_config) == {SECOND_RUNNER_LIST: listed}
    assert vars(vllm_config) == {SECOND_RUNNER_LIST: {"Theirs"}}
    del vars(vllm_config)[SECOND_RUNNER_LIST]  # as in newer versions
    with second_runner(["Qwen3MoeForCausalLM"]):
        assert vars(vllm_config) == {}


@pytest.mark.engine
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")
def test_the_stream_of_a_step_has_the_name_that_is_looked_for() -> None:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    assert "main_stream" in vars(GPUModelRunner)
