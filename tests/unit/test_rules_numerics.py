"""What `numerics.match=exact` refuses, each by its name."""

from __future__ import annotations

from typing import Any

import pytest
from command_line import QUICKSTART

from hybridrl.config.load import load_config_dict
from hybridrl.config.rules import check
from hybridrl.config.schema import Config
from hybridrl.services.planner.plan_report import plan_report

LLAMA = {"model_type": "llama"}


def config(*overrides: str, algorithm: str = "grpo") -> Config:
    content = {"run": {"name": "x"}, "model": {"init": "x"}, "algorithm": {"name": algorithm}}
    return load_config_dict(content, ["numerics.match=exact", *overrides])


def refusals(found: Config, shape: dict[str, Any]) -> dict[str, str]:
    errors = check(found, 2, shape)
    return {error.name: str(error) for error in errors if "numerics.match" in str(error)}


def test_exact_mode_uses_torchs_layers_and_refuses_nothing_that_it_supports() -> None:
    assert config().train.layers == "torch"
    for kind in ("llama", "qwen3", "gemma3_text"):
        assert refusals(config("steps.updates_per_step=2"), {"model_type": kind}) == {}
    close = config("numerics.match=close", "train.tp=2")
    assert close.train.layers == "auto"
    assert refusals(close, {"model_type": "gpt_oss"}) == {}


@pytest.mark.parametrize(
    "override",
    [
        "train.tp=2",
        "train.cp=2",
        "rollout.tp=2",
        "rollout.engine=sglang",
        "train.layers=transformer_engine",
        "train.fp8=hybrid",
        "train.fp32_residual=true",
        "rollout.quantization=fp8",
        "rollout.kv_cache_dtype=fp8",
        "rollout.top_p=0.9",
        "rollout.top_k=20",
    ],
)
def test_exact_mode_refuses_a_knob_by_its_name(override: str) -> None:
    key, _, value = override.partition("=")
    found = refusals(config(override), LLAMA)
    assert value in found[key].lower()
    assert "numerics.match=close" in found[key]


def test_exact_mode_refuses_models_adapters_and_algorithms() -> None:
    for found in (
        refusals(config(), {"model_type": "gpt_oss"}),
        refusals(config(), {"model_type": "gemma2"}),
        refusals(config("lora.rank=8"), LLAMA),
        refusals(config(algorithm="sft"), LLAMA),
    ):
        assert set(found) == {"numerics.match"}


def test_a_plan_for_gpus_refuses_exact_mode() -> None:
    model = f"model.init={QUICKSTART / 'model'}"
    _, violations = plan_report(config("rollout.engine=vllm", model), 1)
    said = [str(one) for one in violations if one.name == "numerics.match"]
    assert len(said) == 1 and "on GPUs" in said[0]
